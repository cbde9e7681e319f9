"""Who can compute which mask: Keel, FlashAttention-3, cuDNN and FlexAttention behind one signature.

A maker takes a problem and gives a differentiable call (tokens, heads, d) q, k, v -> out, or None
where that library cannot do the mask at all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_masks import PLAIN, Problem

import keel

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Maker = Callable[[Problem], Attend | None]

PROVIDERS = {
    "keel": "Keel, with max logits",
    "keel-plain": "Keel, without max logits",
    "fa3": "FlashAttention-3: batch path for plain masks, varlen for documents",
    "fa3-loop": "FlashAttention-3, one call for each rectangle of the mask",
    "cudnn": "cuDNN through torch's scaled_dot_product_attention",
    "flex": "FlexAttention: slow to compile, so only on request",
}
DEFAULT = ("keel", "fa3", "fa3-loop", "cudnn")


def is_ours(provider: str) -> bool:
    return provider.partition(":")[0] in ("keel", "keel-plain")


def can_do(provider: str, problem: Problem) -> bool:
    if provider == "cudnn":
        return problem.name in ("full", "causal")
    if provider == "fa3":
        return problem.name in PLAIN or problem.bounds is not None
    if provider == "fa3-loop":
        return problem.name not in PLAIN and problem.bounds is None and bool(problem.rectangles)
    return True


def maker(provider: str, peers: Path | None) -> Maker:
    """`keel:triton` and `keel-plain:triton` ask for one backend of Keel."""
    name, _, backend = provider.partition(":")
    if is_ours(provider):
        make: Maker = functools.partial(_keel, name == "keel", backend or "auto")
    elif provider == "cudnn":
        make = _cudnn
    elif provider == "flex":
        make = _flex
    elif provider in ("fa3", "fa3-loop"):
        if peers is None or not (peers / "fa3_peer.py").exists():
            raise FileNotFoundError(f"{provider} needs --peers, a folder with fa3_peer.py")
        make = functools.partial(_fa3 if provider == "fa3" else _fa3_loop, _load_fa3(peers))
    else:
        raise ValueError(f"unknown provider {provider!r}: one of {', '.join(PROVIDERS)}")
    return lambda problem: make(problem) if can_do(provider, problem) else None


def _keel(with_max: bool, backend: str, problem: Problem) -> Attend:
    def attend(q, k, v):
        return keel.flex_flash_attn_func(
            q, k, v, problem.mask, return_max_logits=with_max, backend=backend
        )[0]

    return attend


def _cudnn(problem: Problem) -> Attend:
    # Settings of the process, not a context around each call: that would cost host time.
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)

    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    return attend


def _flex(problem: Problem) -> Attend:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # its backward runs many times on one graph
    torch._dynamo.reset()
    block_mask = None
    if problem.name != "full":
        mod = flex_mask_mod(problem, "cuda")
        block_mask = create_block_mask(mod, None, None, problem.tokens, problem.tokens, "cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)

    return attend


def flex_mask_mod(problem: Problem, device: str) -> Callable[..., torch.Tensor]:
    """The mask as FlexAttention's function of positions, without loads where it can do without."""
    if problem.name == "causal":
        return lambda b, h, i, j: i >= j
    if problem.name == "swa":
        window = problem.window
        return lambda b, h, i, j: (i >= j) & (i - j <= window)
    start, end = (torch.from_numpy(x).int().to(device) for x in problem.row_ranges())
    return lambda b, h, i, j: (j >= start[i]) & (j < end[i])


@functools.cache
def _load_fa3(folder: Path) -> Any:
    sys.path.append(str(folder))
    from fa3_peer import load

    return load(str(folder))


def _fa3(peer: Any, problem: Problem) -> Attend:
    cu, longest = None, None
    if problem.bounds:
        cu = torch.tensor(problem.bounds, dtype=torch.int32, device="cuda")
        longest = int(cu.diff().max())
    options = (cu, longest, problem.causal, problem.window)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            batch = [x if cu is not None else x[None] for x in (q, k, v)]
            out, lse = peer.fwd(*batch, *options)
            ctx.save_for_backward(*batch, out, lse)
            return out if cu is not None else out[0]

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            dout = dout if cu is not None else dout[None]
            grads = peer.bwd(dout, q, k, v, out, lse, *options)
            return tuple(x if cu is not None else x[0] for x in grads)

    return Attention.apply


def _fa3_loop(peer: Any, problem: Problem) -> Attend:
    """What is left to users of FA3 on block masks: a call for each block of rows.

    Gradients of keys that several blocks see are added up in fp32.
    """
    parts = [(slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in problem.rectangles or ()]
    options = (None, None, False, -1)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            found = [
                peer.fwd(q[None, rows], k[None, keys], v[None, keys], *options)
                for rows, keys in parts
            ]
            out = torch.cat([part[0] for part, _ in found])  # parts are in the order of rows
            ctx.save_for_backward(q, k, v, out, *(lse for _, lse in found))
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, *lses = ctx.saved_tensors
            dq = []
            dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
            for (rows, keys), lse in zip(parts, lses, strict=True):
                block = [x[None, part] for x, part in ((dout, rows), (q, rows), (k, keys))]
                grads = peer.bwd(*block, v[None, keys], out[None, rows], lse, *options)
                dq.append(grads[0][0])
                dk[keys] += grads[1][0]
                dv[keys] += grads[2][0]
            return torch.cat(dq), dk.to(k.dtype), dv.to(v.dtype)

    return Attention.apply
