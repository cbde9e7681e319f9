"""Models of transformers on the kernels of a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.models import (
    DENSE,
    assert_rounded_as,
    pair,
    results_of_batches,
    tiny,
    tokens,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_bf16(name: str, packed: bool) -> None:
    eager, ours = (model.bfloat16().to(DEVICE) for model in pair(name, **DENSE[name]))
    wide = copy.deepcopy(eager).float()
    inputs = {}
    if packed and name != "gpt_oss":  # whose eager attention ignores packing
        positions = torch.cat([torch.arange(n, device=DEVICE) for n in (7, 2, 11)])[None]
        inputs = {"position_ids": positions, "use_cache": False}
    assert_rounded_as(*(results_of_batches(model, **inputs) for model in (ours, eager, wide)))


def test_max_logits() -> None:
    dense, ours = (tiny("mistral", x).to(DEVICE) for x in ("dense", "keel"))
    for model in (dense, ours):
        model(input_ids=tokens().to(DEVICE))
    for one, two in zip(dense.model.layers, ours.model.layers, strict=True):
        expected = one.self_attn.current_max_attn_logits
        torch.testing.assert_close(
            two.self_attn.current_max_attn_logits, expected, rtol=1e-3, atol=1e-3
        )
