"""The pages in docs/ are true: Python runs as printed, commands exist, pictures fit."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from tests.doc_blocks import (
    ROOT,
    Block,
    blocks_of,
    check_command,
    check_commands,
    keel_commands,
    run_python,
)

import keel.compat.megatron

PAGES = sorted((ROOT / "docs").rglob("*.md"))


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
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    comments = re.findall("^<!-- not run", text, re.MULTILINE)
    assert len(comments) == len(left_out), "a comment that stands before no block"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("path", [x for x in PAGES if keel_commands(x)], ids=ids)
def test_commands(path: Path) -> None:
    pytest.importorskip("typer")
    assert check_commands(path) >= 1


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
