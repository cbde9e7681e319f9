"""Fenced blocks of Markdown pages, run as they are printed: README.md and docs/.

Python blocks of a page are one program, on the CPU. A block that cannot run there has a comment in
front of it that says what it needs, which no reader of the rendered page sees:

    <!-- not run: needs two GPUs -->
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

EXTRAS = ("transformers",)
"""What blocks may import that is not installed everywhere."""

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
