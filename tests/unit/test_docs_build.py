"""The documentation builds without a warning, and no link of it leads nowhere."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.doc_blocks import ROOT

if "CI" not in os.environ:  # there, Sphinx is installed or something is wrong
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason="pip install 'keel-attn[docs]'")

DOCUMENTED = ("masks", "distributed", "optim", "softmax", "overlap", "nn")


def test_the_site(tmp_path: Path) -> None:
    """One test, so that it is built once however many processes share the tests."""
    site = build(tmp_path)
    assert len(list(site.rglob("*.html"))) > 15
    assert dead_links(site) == []
    check_contents(site)
    check_public_names(site)


def build(out: Path) -> Path:
    """The pages as HTML, without a warning."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q"]
    command += ["-d", str(out / "doctrees"), str(ROOT / "docs"), str(out / "html")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return out / "html"


class Page(HTMLParser):
    """What a page links to, and what of it can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = pages.get(target)
            anchor = unquote(parts.fragment)
            if not target.exists() or (there and anchor and anchor not in there.anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x">, <a href="c.html">, <img src="d.png">')
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html"><a href="#y"><a href="http://x">')
    assert dead_links(tmp_path) == [f"a.html: {x}" for x in ("b.html#x", "c.html", "d.png")]


def check_contents(site: Path) -> None:
    """Each page of docs/ can be reached from the first one's list."""
    index = Page(site / "index.html")
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert name == "index.html" or name in index.links, name


def check_public_names(site: Path) -> None:
    """Each has its place in the reference."""
    anchors = set().union(*(Page(path).anchors for path in (site / "api").glob("*.html")))
    for package in DOCUMENTED:
        module = importlib.import_module(f"keel.{package}")
        for name in module.__all__:
            assert f"keel.{package}.{name}" in anchors, f"keel.{package}.{name}"
    keel = importlib.import_module("keel")
    for name in keel.__all__:
        places = {f"keel.{name}", f"keel.masks.{name}", f"module-keel.{name}"}
        assert name == "__version__" or places & anchors, f"keel.{name}"
