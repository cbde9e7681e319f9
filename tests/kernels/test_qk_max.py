"""The maximum of q·k in Triton's interpreter, against the oracle's max logits."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import masks, reference
from keel.masks import AttnMask
from keel.meta import Scoring
from keel.optim import max_logits

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from keel.kernels import qk_max
from keel.kernels.flash_common import TileConfig

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True, params=[False, True], ids=["pointers", "tma"])
def small_tiles(request):
    config = TileConfig(16, 32, 4, 1, request.param)
    with mock.patch.object(qk_max, "choose_config", lambda *_: config):
        yield


def oracle(q: torch.Tensor, k: torch.Tensor, mask: AttnMask, scale: float) -> torch.Tensor:
    q, k = q.double(), k.double()
    return reference.attention(q, k, k, mask, Scoring(scale=scale), dtype=torch.float64)[2]


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    mask=attn_masks(max_tokens=49, max_slices=5),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    d=st.sampled_from([8, 16, 40, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    scale=st.sampled_from([None, 0.7, -0.4, 0.0]),
)
def test_any_mask(mask, heads, d, dtype, scale):
    torch.manual_seed(0)
    q, k = (torch.randn(n, h, d).to(dtype) for n, h in zip(mask.shape, heads, strict=True))
    got = max_logits(q, k, mask, softmax_scale=scale, backend="triton")
    want = oracle(q, k, mask, d**-0.5 if scale is None else scale).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_running_maximum_and_samples():
    torch.manual_seed(0)
    q, k = torch.randn(3, 40, 4, 16), torch.randn(3, 40, 2, 16)
    each = torch.stack([oracle(*x, masks.causal(40), 0.25) for x in zip(q, k, strict=True)]).float()
    got = max_logits(q, k, masks.causal(40), backend="triton")
    torch.testing.assert_close(got, each.amax(0), rtol=1e-5, atol=1e-5)
    running = torch.tensor([100.0, -INF, 0.1, -100.0])
    again = max_logits(q, k, masks.causal(40), out=running, backend="triton")
    assert again is running
    torch.testing.assert_close(running, torch.cat([torch.tensor([100.0]), each.amax(0)[1:]]))


@pytest.mark.parametrize("backend", ["triton", "blocked"])
def test_nan_counts_where_it_is_seen(backend):
    torch.manual_seed(0)
    q, k = torch.randn(48, 2, 16), torch.randn(48, 2, 16)
    k[40, 1] = NAN
    mask = masks.documents([0, 32, 48], causal=True)
    top = max_logits(q, k, mask, backend=backend)
    assert top[0].isfinite() and top[1].isnan()
    hidden = masks.documents([0, 40], causal=True, tq=40, tk=48)  # in a tile that is visited
    top = max_logits(q[:40], k, hidden, backend=backend)
    assert top.isfinite().all()
    nothing = max_logits(q, k, AttnMask([], 48, 48), backend=backend)
    assert (nothing == -INF).all()


def test_strides_of_all_sorts():
    torch.manual_seed(0)
    q = torch.randn(4, 33, 16).transpose(0, 1)  # heads first in memory
    k = torch.randn(33, 2, 32)[..., ::2]  # no contiguous last dim
    got = max_logits(q, k, masks.causal(33), backend="triton")
    torch.testing.assert_close(got, oracle(q, k, masks.causal(33), 0.25).float())
