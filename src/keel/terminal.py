"""What the commands share: a console, masks as text, JSON. Needs the extra `cli`."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from keel.masks import AttnMask


def make_console(**options: Any) -> Console:
    # No highlighter: it would colour every number.
    return Console(highlight=False, emoji=False, **options)


def print_art(console: Console, mask: AttnMask) -> None:
    art = mask.draw(size=min(48, max(8, console.width - 12)))
    if not console.encoding.lower().startswith("utf"):
        art = art.translate(str.maketrans("█▒·", "#+."))
    console.print(art, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
