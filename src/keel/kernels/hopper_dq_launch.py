"""dq of the Hopper backward in a fixed order, from the host: form, tiles, launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from keel.kernels.flash_common import num_sms, section_heads
from keel.kernels.hopper_launch import block_of, describing, on_device
from keel.kernels.launch import Prepared, Recipe, launch
from keel.masks import AttnMask
from keel.tile_records import ROWS, best_records

if TYPE_CHECKING:
    from keel.kernels.hopper_common import QueryForm

BLOCK_NS = (64, 128)


def fill_dq(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse2: torch.Tensor,
    delta: torch.Tensor,
    mask: AttnMask,
    scale: float,
    *,
    dq: torch.Tensor,
    sm_margin: int = 0,
    form: QueryForm | None = None,
) -> Recipe:
    """For tensors that TMA takes; dq is contiguous, lse2 and delta are (hq, tq)."""
    from keel.kernels.hopper_bwd_dq import hopper_bwd_dq_kernel

    return launch(
        hopper_bwd_dq_kernel,
        (mask, scale, sm_margin, form),
        {
            **{"Q": q, "K": k, "V": v, "DO": dout, "DQ": dq, "DQ_OUT": dq},
            **{"LSE2": lse2, "DELTA": delta},
        },
        lambda: _prepare(dout, q, k, v, mask, scale, dq, sm_margin, form),
    )


def choose_query_form(
    d: int, dim_v: int, bn: int, *, out_matches: bool, persistent: bool
) -> QueryForm:
    """What is compiled for head dims and blocks of bn keys; out_matches: dq has q's dtype."""
    from keel.kernels.hopper_common import QueryForm

    block_d = max(block_of(d), block_of(dim_v))
    return QueryForm(
        *(block_d, bn, d),
        stages=3 if bn == 64 else 2,
        staged=out_matches,
        persistent=persistent,
    )


def _prepare(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    scale: float,
    dq: torch.Tensor,
    sm_margin: int,
    form: QueryForm | None,
) -> Prepared | None:
    (tq, hq, d), (tk, hk, dim_v) = q.shape, v.shape
    records = best_records(mask, BLOCK_NS if form is None else (form.bn,))
    if form is None:
        form = choose_query_form(
            *(d, dim_v, records.block_n),
            out_matches=dq.dtype == q.dtype,
            persistent=sm_margin > 0,
        )
    num_tiles = len(records.tiles)
    if num_tiles * hq == 0:
        return None
    section = section_heads(hq, hk, tk * (d + dim_v) * k.element_size(), records.work, q.device)
    rows, keys = (ROWS // 2, form.d), (form.bn, form.d)
    streamed = {
        **{"Q": describing(q, rows), "DO": describing(dout, rows)},
        **{"K": describing(k, keys), "V": describing(v, keys)},
    }
    if form.staged:
        streamed["DQ"] = describing(dq, rows)
    grid: tuple[int, ...] = (section, num_tiles, hq // section)
    if form.persistent:
        grid = (min(num_sms(q.device) - sm_margin, num_tiles * hq),)
    return Prepared(
        grid,
        {
            **on_device(records, q.device),
            **{"scale": scale, "tq": tq, "num_tiles": num_tiles, "section": section},
            **{"num_heads": hq, "group": hq // hk, "FORM": form},
        },
        num_warps=4,
        streamed=streamed,
        left_out=() if form.staged else ("DQ",),
    )
