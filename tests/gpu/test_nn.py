"""`DotProductAttention` on a real GPU, both paths, against dense attention in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.nn_cases import (
    PATHS,
    assert_same,
    band,
    dense,
    leaves_of,
    make,
    make_config,
    make_module,
    normal,
    with_gradients,
)

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "square": {"sq": 150},
    "longer keys": {"sq": 90, "sk": 161},
    "mla": {"sq": 130, "hn": 192, "hv": 128},
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, (40, 0)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", PATHS)
def test_against_dense(path, dtype, shape, window, compiled):
    tensors = make(**SHAPES[shape], groups=2, dtype=dtype)
    sizes = {"k_channels": tensors["query"].shape[-1], "v_channels": tensors["value"].shape[-1]}
    config = make_config(
        num_query_groups=2,
        softmax_type="learnable",
        params_dtype=dtype,
        qk_clip=True,
        window_size=window,
    )
    here = make_module(path, config, 1, "causal_bottom_right", **sizes)
    there = make_module(path, config, 1, "causal_bottom_right", **sizes).cuda()
    leaves = leaves_of(here, tensors)
    hidden = band(len(tensors["query"]), len(tensors["key"]), True, window)
    want = dense(**tensors, hidden=hidden, scale=here.softmax_scale, sink=leaves["sink"])
    copies = {name: x.detach().cuda().requires_grad_() for name, x in tensors.items()}
    torch.compiler.reset()  # all cases compile one function, which torch does eight times at most
    call = torch.compile(there, fullgraph=True) if compiled else there
    out = call(**copies)
    grads = torch.autograd.grad(
        out, list(leaves_of(there, copies).values()), normal(*out.shape, seed=9).cuda().to(dtype)
    )
    got = {f"d{name}": grad.cpu() for name, grad in zip(leaves, grads, strict=True)}
    assert_same({"out": out.detach().cpu(), **got}, with_gradients(want["out"], leaves), dtype)
    assert_same({"top": there.current_max_attn_logits.cpu()}, {"top": want["top"]}, dtype)
