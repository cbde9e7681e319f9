"""The pages in docs/ are true: Python runs as printed, commands exist, pictures fit."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.doc_blocks import ROOT, Block, blocks_of, keel_commands, run_python

import keel.compat.megatron

PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN = (("env",), ("plan",), ("overlap", "advise"))
"""Commands that end within seconds; of the others names and options are checked."""


def ids(path: Path) -> str:
    return path.relative_to(ROOT / "docs").as_posix()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No GPU, a folder of its own, and nothing left behind in the process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    yield
    keel.compat.megatron.uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("path", [x for x in PAGES if blocks_of(x, "python")], ids=ids)
def test_python_blocks_run(path: Path) -> None:
    run_python(path)
    assert not dist.is_initialized(), "the page leaves its process group behind"


def test_blocks_that_do_not_run_say_what_they_need() -> None:
    """So that leaving one out is a decision: they are few, and each names what is not here."""
    left_out = [x for page in PAGES for x in blocks_of(page) if x.not_run is not None]
    assert len(left_out) <= 3
    assert all(block.not_run.startswith("needs ") for block in left_out if block.not_run)
    comments = [x for page in PAGES for x in re.findall("<!-- not run", page.read_text("utf-8"))]
    assert len(comments) == len(left_out), "a comment that stands before no block"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("path", [x for x in PAGES if keel_commands(x)], ids=ids)
def test_commands(path: Path) -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from keel import cli

    app = cli.build_app()
    plain = {"FORCE_COLOR": None, "NO_COLOR": "1", "COLUMNS": "100"}
    for arguments in keel_commands(path):
        if any(tuple(arguments[: len(x)]) == x for x in RUN):
            result = typer_testing.CliRunner().invoke(app, arguments, env=plain)
            assert result.exit_code == 0, (arguments, result.output)
        else:
            check_command(arguments)
    for command, printed in outputs_of(path):
        result = typer_testing.CliRunner().invoke(app, command, env=plain)
        assert strip_lines(result.output) == strip_lines(printed)


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


def outputs_of(path: Path) -> Iterator[tuple[list[str], str]]:
    """(arguments, what the page says it prints), where a text block follows one command."""
    page = path.read_text("utf-8")
    for line, printed in re.findall(
        r"^```bash\nkeel ([^\n]+)\n```\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    ):
        yield line.split(), printed


def strip_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def make_images() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_images", ROOT / "docs/make_images.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_show_the_masks_of_their_page() -> None:
    """Each was drawn from the block above it: python docs/make_images.py draws them again."""
    image = pytest.importorskip("matplotlib.image")
    made = make_images()
    pictured = made.masks_of_page()
    assert len(pictured) >= 8
    for name, mask in pictured.items():
        on_disk = torch.from_numpy(image.imread(ROOT / "docs" / name)[..., :3])
        now = torch.from_numpy(made.small_picture(mask))
        assert on_disk.shape == now.shape, name
        assert (on_disk - now).abs().max() < 1 / 128, name


@pytest.mark.parametrize("words", [["overlap", "lap"], ["demo", "--quickly"], ["plans"]])
def test_a_wrong_command_is_found(words: list[str]) -> None:
    pytest.importorskip("typer")
    with pytest.raises(AssertionError):
        check_command(words)


def test_a_wrong_block_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper itself: it fails at the line of the page, and leaves out only what says so."""
    import tests.doc_blocks as doc_blocks

    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```python\ny = x + z\n```\n")
    with pytest.raises(NameError, match="z"):
        run_python(page)
    marked = page.read_text().replace("```python\ny", "<!-- not run: needs z -->\n\n```python\ny")
    page.write_text(marked)
    assert run_python(page) == 1
    first, second = blocks_of(page)
    assert first == Block("page.md", 4, "python", "x = 1\n", None)
    assert (second.not_run, second.line) == ("needs z", 10)
