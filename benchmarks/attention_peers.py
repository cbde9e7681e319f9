"""Who can compute which mask: Keel, FlashAttention-3, torch's attention and FlexAttention.

A maker takes a problem and gives a differentiable call (tokens, heads, d) q, k, v -> out, the same
for all. A library that is not here is a `Missing` with the reason.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_masks import PLAIN, Problem

import keel

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Maker = Callable[[Problem], Attend]

OURS = {
    "keel": "Keel, with max logits",
    "keel-plain": "Keel, without max logits",
}
PEERS = {
    "fa3": "FlashAttention-3: batch path for plain masks, varlen for documents",
    "fa3-loop": "FlashAttention-3, one call for each rectangle of the mask",
    "cudnn": "cuDNN through torch's scaled_dot_product_attention",
    "flash": "FlashAttention-2 through torch's scaled_dot_product_attention",
    "sdpa": "torch's scaled_dot_product_attention as it chooses, with a dense mask where needed",
    "flex": "FlexAttention, compiled, with a block mask",
}
ON_GPU = ("fa3", "fa3-loop", "cudnn", "flash", "flex")
ON_CPU = ("sdpa",)
FA3_FOLDER = "KEEL_BENCH_FA3"
"""Environment variable: the default of --fa3."""


class Missing(Exception):
    """A peer that is not here: the reason goes where its figures would."""


def is_ours(provider: str) -> bool:
    return provider.partition(":")[0] in OURS


def why_not(provider: str, problem: Problem) -> str | None:
    """Why a library cannot do a mask at all; None if it can."""
    if provider in ("cudnn", "flash") and problem.name not in ("full", "causal"):
        return "torch's fused attention knows full and causal masks alone"
    if provider == "fa3" and problem.name not in PLAIN and problem.bounds is None:
        return "it has no such mask: see fa3-loop"
    if provider == "fa3-loop" and not is_loop(problem):
        return "one call of fa3 does it"
    if provider == "sdpa" and problem.tokens > 8192:
        return "its dense mask would not fit"
    return None


def is_loop(problem: Problem) -> bool:
    """Whether FlashAttention needs a call for each rectangle."""
    return problem.name not in PLAIN and problem.bounds is None and bool(problem.rectangles)


def default_folder() -> Path | None:
    """Where fa3_peer.py is: what the environment says, else .peers beside benchmarks/."""
    folder = Path(os.environ.get(FA3_FOLDER) or Path(__file__).parents[1] / ".peers")
    return folder if (folder / "fa3_peer.py").exists() else None


def why_absent(provider: str, folder: Path | None) -> str | None:
    """Why a peer cannot run on this machine; None if it can, as far as one can tell."""
    on_gpu = torch.cuda.is_available()
    if provider in ("fa3", "fa3-loop"):
        if folder is not None and not (folder / "fa3_peer.py").exists():
            return f"no fa3_peer.py in {folder.name}: --fa3 or {FA3_FOLDER} name its folder"
        if folder is None and importlib.util.find_spec("flash_attn_interface") is None:
            return f"not installed: flash_attn_interface, or --fa3 or {FA3_FOLDER} name a folder"
        if not on_gpu or torch.cuda.get_device_capability()[0] != 9:
            return "needs a Hopper GPU"
    if provider in ("cudnn", "flash") and not on_gpu:
        return "needs a CUDA GPU"
    return None


def maker(provider: str, folder: Path | None = None) -> Maker:
    """`keel:triton` and `keel-plain:triton` ask for one backend of Keel."""
    name, _, backend = provider.partition(":")
    if is_ours(provider):
        return functools.partial(_keel, name == "keel", backend or "auto")
    if provider not in PEERS:
        raise ValueError(f"unknown peer {provider!r}: one of {', '.join(PEERS)}")
    if reason := why_absent(provider, folder):
        raise Missing(reason)
    if provider in ("fa3", "fa3-loop"):
        return functools.partial(_fa3 if provider == "fa3" else _fa3_loop, _load_fa3(folder))
    makers = {"cudnn": _cudnn, "flash": _flash, "sdpa": _sdpa, "flex": _flex}
    return makers[provider]


def _keel(with_max: bool, backend: str, problem: Problem) -> Attend:
    def attend(q, k, v):
        return keel.flex_flash_attn_func(
            q, k, v, problem.mask, return_max_logits=with_max, backend=backend
        )[0]

    return attend


def _cudnn(problem: Problem) -> Attend:
    return _torch_attention(problem, cudnn=True)


def _flash(problem: Problem) -> Attend:
    return _torch_attention(problem, cudnn=False)


def _torch_attention(problem: Problem, *, cudnn: bool) -> Attend:
    def attend(q, k, v):
        _allow(cudnn=cudnn, flash=not cudnn, others=False)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    return attend


def _allow(*, cudnn: bool, flash: bool, others: bool) -> None:
    # Switches of the process before each call, and no context around it: that would cost
    # microseconds of the host, and these some hundred nanoseconds.
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(others)
    torch.backends.cuda.enable_math_sdp(others)


def _sdpa(problem: Problem) -> Attend:
    dense = None
    if problem.name not in ("full", "causal"):
        dense = problem.mask.to_dense().to("cuda" if torch.cuda.is_available() else "cpu")

    def attend(q, k, v):
        _allow(cudnn=True, flash=True, others=True)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *(q, k, v, dense),
            is_causal=problem.name == "causal",
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out[0].transpose(0, 1)

    return attend


def _flex(problem: Problem) -> Attend:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # its backward runs many times on one graph
    torch._dynamo.reset()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block_mask = None
    if problem.name != "full":
        mod = flex_mask_mod(problem, device)
        block_mask = create_block_mask(mod, None, None, problem.tokens, problem.tokens, device)
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
@functools.cache  # its operators can be registered once
def _load_fa3(folder: Path | None) -> Any:
    """What fa3_peer.py loads, with `fwd` and `bwd`; without a folder the installed package."""
    if folder is None:
        import flash_attn_interface

        return flash_attn_interface
    sys.path.append(str(folder))
    from fa3_peer import load

    return load(str(folder))


def _fa3(peer: Any, problem: Problem) -> Attend:
    cu, longest = None, None
    if problem.bounds:
        cu = torch.tensor(problem.bounds, dtype=torch.int32, device="cuda")
        longest = int(cu.diff().max())
    options = (cu, longest, problem.causal, problem.window)
    if hasattr(peer, "flash_attn_func"):
        return functools.partial(_installed_fa3, peer, options)

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


def _installed_fa3(peer: Any, options: tuple, q, k, v) -> torch.Tensor:
    cu, longest, causal, window = options
    rules = {"causal": causal, "window_size": (window, 0 if window >= 0 else -1)}
    if cu is None:
        out = peer.flash_attn_func(q[None], k[None], v[None], **rules)
    else:
        out = peer.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **rules)
    out = out[0] if isinstance(out, tuple) else out  # versions differ in whether the lse comes too
    return out if cu is not None else out[0]


def _fa3_loop(peer: Any, problem: Problem) -> Attend:
    """What is left to users of FA3 on block masks: a call for each block of rows.

    Gradients of keys that several blocks see are added up in fp32.
    """
    parts = [(slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in problem.rectangles or ()]
    options = (None, None, False, -1)
    if hasattr(peer, "flash_attn_func"):
        one = functools.partial(_installed_fa3, peer, options)
        return lambda q, k, v: torch.cat([one(q[rows], k[keys], v[keys]) for rows, keys in parts])

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
