"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import keel

MODULES = ["keel", *(m.name for m in pkgutil.walk_packages(keel.__path__, "keel."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        # Extras and Triton may be absent; anything of our own may not.
        if missing.name is None or missing.name.split(".")[0] == "keel":
            raise
        pytest.skip(f"needs {missing.name}")
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_the_main_calls_have_examples() -> None:
    finder = doctest.DocTestFinder()
    for public in (
        keel.flex_flash_attn_func,
        keel.flash_attn_func,
        keel.flash_attn_varlen_func,
        keel.AttnMask,
    ):
        assert any(test.examples for test in finder.find(public)), public.__name__
