"""What "auto" means on a Hopper GPU, for attention."""

from __future__ import annotations

import pytest
import torch

from keel import ops
from keel.meta import Scoring

pytest.importorskip("triton")
from keel.kernels import hopper_launch

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_triton_problem", lambda device, dtype: None)
    monkeypatch.setattr(hopper_launch, "machine_problem", lambda device: None)


def settled(backend: str, dtype: torch.dtype = torch.bfloat16, **scores: object) -> str:
    x = torch.zeros(4, 2, 64, dtype=dtype)
    return ops.settled_backend(backend, x, x, x, Scoring(scale=1.0, **scores))


@pytest.mark.usefixtures("hopper")
def test_auto_takes_the_hopper_kernels_where_they_can_serve() -> None:
    assert settled("auto") == settled("auto", torch.float16, softcap=5.0) == "hopper"
    assert settled("auto", torch.float32) == "triton"
    assert settled("auto", bias=torch.zeros(2, 4, 4)) == "triton"
    assert settled("triton") == "triton"  # an explicit one is never replaced
    odd = torch.zeros(4, 2, 63, dtype=torch.bfloat16)
    expanded = torch.zeros(4, 1, 64, dtype=torch.bfloat16).expand(4, 2, 64)
    for x in (odd, expanded):
        assert ops.settled_backend("auto", x, x, x, Scoring(scale=1.0)) == "triton"


@pytest.mark.usefixtures("hopper")
def test_what_is_said_of_it() -> None:
    assert ops.explain_attention_backend(GPU, torch.bfloat16)[0] == "hopper"
    assert ops.explain_attention_backend(GPU, torch.float32)[0] == "triton"
    assert ops.explain_backend(GPU, torch.bfloat16)[0] == "triton"  # softmax has no other
    assert ops.explain_attention_backend(torch.device("cpu"), torch.bfloat16)[0] == "blocked"


def test_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_triton_problem", lambda device, dtype: None)
    assert settled("auto") == "triton"  # tensors on the CPU are on no Hopper GPU
