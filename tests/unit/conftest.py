"""A GPU that does nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from host_stub import Stub

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts: plain names


@pytest.fixture
def stub() -> Iterator[Stub]:
    from host_stub import stubbed  # not where kernels are interpreted

    with stubbed() as stub:
        yield stub
