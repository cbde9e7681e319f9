"""The README is true: its Python runs, its files exist, and every file of the library is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.doc_blocks import ROOT, blocks_of, check_commands, run_python

PAGE = ROOT / "README.md"
README = PAGE.read_text(encoding="utf-8")


def test_python_blocks_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU, from top to bottom, as one program: later blocks use names of earlier ones."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert all(block.not_run is None for block in blocks_of(PAGE, "python"))
    assert run_python(PAGE) >= 5


def test_tree_names_every_file() -> None:
    (tree,) = (block.code for block in blocks_of(PAGE, "text"))
    listed = set(re.findall(r"^  ([\w/]+\.py) ", tree, re.MULTILINE))
    library = ROOT / "src" / "keel"
    files = {path.relative_to(library).as_posix() for path in library.rglob("*.py")}
    assert listed == {name for name in files if not name.endswith("/__init__.py")}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = ROOT / path if path else PAGE
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def headings(path: Path) -> set[str]:
    """Headings of a page as links name them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that end within seconds; of the others names and options are checked."""
    pytest.importorskip("typer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert check_commands(PAGE) >= 3
