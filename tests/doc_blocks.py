"""Fenced blocks of Markdown pages, run as they are printed: README.md and docs/.

Python blocks of a page are one program, on the CPU. A block that cannot run there has a comment in
front of it that says what it needs, which no reader of the rendered page sees:

    <!-- not run: needs two GPUs -->
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

EXTRAS = ("transformers", "megatron", "torchtitan", "lightning")
"""What blocks may import that is not installed everywhere."""

RUN = (["env"], ["plan"], ["overlap", "advise"])
"""Commands that end within seconds; of the others names and options are checked."""

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    """Of its first line of code, in the page."""
    language: str
    code: str
    not_run: str | None
    """Why it cannot run here; None: it can."""


def blocks_of(path: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page in order; of one language, or all."""
    text, page = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    found = [
        Block(page, text.count("\n", 0, m.start("code")) + 1, m["language"], m["code"], m["reason"])
        for m in _BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def run_python(path: Path) -> int:
    """Runs the Python blocks of a page from top to bottom, as one program; returns how many.

    Later blocks use names of earlier ones. Where an extra is not installed, blocks that import it
    are left out, and those that then lack a name.
    """
    names: dict[str, object] = {"__name__": "__page__"}
    ran, missing = 0, False
    for block in blocks_of(path, "python"):
        if block.not_run is not None:
            continue
        code = "\n" * (block.line - 1) + block.code  # tracebacks then show lines of the page
        try:
            exec(compile(code, block.page, "exec"), names)
            ran += 1
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            missing = True
        except NameError:
            if not missing:
                raise
    return ran


def keel_commands(path: Path) -> list[list[str]]:
    """Arguments of each `keel ...` line in the bash blocks of a page, comments left out."""
    lines = "".join(x.code for x in blocks_of(path, "bash") if x.not_run is None).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["keel"]]


def check_commands(path: Path) -> int:
    """Runs the quick `keel` commands of a page, and checks the others; returns how many there are.

    Where a text block follows a bash block of one command, it must be what that prints.
    """
    from typer.testing import CliRunner

    from keel import cli

    def run(arguments: list[str]) -> str:
        plain = {"FORCE_COLOR": None, "NO_COLOR": "1", "COLUMNS": "100"}
        result = CliRunner().invoke(cli.build_app(), arguments, env=plain)
        assert result.exit_code == 0, (arguments, result.output)
        return result.output

    commands = keel_commands(path)
    for arguments in commands:
        if any(arguments[: len(quick)] == quick for quick in RUN):
            run(arguments)
        else:
            check_command(arguments)
    for arguments, printed in _outputs_of(path):
        assert _lines(run(arguments)) == _lines(printed), arguments
    return len(commands)


def check_command(arguments: list[str]) -> None:
    """That such a command exists and has these options."""
    import typer

    from keel import cli

    command: Any = typer.main.get_command(cli.build_app())
    rest = list(arguments)
    while hasattr(command, "commands") and rest and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    assert not hasattr(command, "commands") or not rest[:1] or rest[0].startswith("--"), arguments
    options = {"--help"}.union(*(parameter.opts for parameter in command.params))
    for word in rest:
        assert not word.startswith("--") or word in options, (arguments, word)


def _outputs_of(path: Path) -> Iterator[tuple[list[str], str]]:
    page = path.read_text(encoding="utf-8")
    for line, printed in re.findall(
        r"^```bash\nkeel ([^\n]+)\n```\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    ):
        yield shlex.split(line, comments=True), printed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
