"""How Sphinx builds these pages: make docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))  # this checkout, whatever is installed

from keel import __version__  # noqa: E402

project = "Keel"
author = "The Keel authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Keel {version}"
html_show_copyright = False
highlight_language = "none"  # blocks say what they are; those that do not are formulas

myst_heading_anchors = 3

default_role = "code"  # single backticks in docstrings, as in Markdown
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
maximum_signature_line_length = 90
# they take seconds, and may not be there
autodoc_mock_imports = ["transformers", "megatron", "lightning", "pytorch_lightning"]

# Types in signatures become links where they are described here. Those of other projects would
# need the network, and private ones, or names that only type checkers see, lead nowhere.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|dist|collections|enum|os|types|typing)\..*"),
    ("py:class", r"keel\.\w+\.\w+\..*"),
    ("py:.*", r"\w+(\[\w+)?"),
]

OPTIONAL_PAGES = ("results",)
"""Pages that are made by benchmarks: the table of contents has them where they are there."""


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("source-read", _leave_out_missing)


def _as_rst(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with backticks, "Args:" and doctests.

    Characters that reST would take for markup are escaped. Sections are looked for where they are:
    in one line about an attribute, Napoleon would take what stands before a colon for a type.
    """
    for n, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(`+[^`]*`+)", line)
            parts[::2] = [re.sub(r"([*|]|(?<=\w)_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
            lines[n] = "".join(parts)
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines, Config(napoleon_use_rtype=False), what=what).lines()


def _leave_out_missing(app: Any, docname: str, source: list[str]) -> None:
    if docname == "index":
        for page in OPTIONAL_PAGES:
            if not (HERE / f"{page}.md").exists():
                source[0] = re.sub(rf"^{page}\n", "", source[0], flags=re.MULTILINE)
