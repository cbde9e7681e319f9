"""The README is true: its Python runs, its files exist, and every file of the library is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


EXTRAS = ("transformers", "megatron", "torchtitan", "lightning")
"""What blocks may import that is not installed everywhere; nothing after them needs their names."""


def test_python_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, from top to bottom, as one program: later blocks use names of earlier ones."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    blocks = _blocks("python")
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for n, block in enumerate(blocks):
        try:
            exec(compile(block, f"README.md, python block {n}", "exec"), names)
        except ModuleNotFoundError as missing:
            if missing.name not in EXTRAS:
                raise


def test_tree_names_every_file() -> None:
    (tree,) = _blocks("text")
    listed = set(re.findall(r"^  ([\w/]+\.py) ", tree, re.MULTILINE))
    library = ROOT / "src" / "keel"
    files = {path.relative_to(library).as_posix() for path in library.rglob("*.py")}
    assert listed == {name for name in files if not name.endswith("/__init__.py")}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
