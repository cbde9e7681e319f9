"""dq of the Hopper backward in a fixed order, from the host: form, tiles, launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from keel.kernels.flash_common import num_sms, section_heads
from keel.kernels.hopper_launch import block_of, describing, on_device
from keel.kernels.launch import Prepared, Recipe, launch
from keel.masks import AttnMask
from keel.meta import Scoring
from keel.tile_records import ROWS, best_records

if TYPE_CHECKING:
    from keel.kernels.hopper_common import QueryForm

BLOCK_NS = (64, 128)
WIDE_BLOCK_NS = (64,)
"""For head dims above 128: registers hold no more."""


def fill_dq(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse2: torch.Tensor,
    delta: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    *,
    dq: torch.Tensor,
    sm_margin: int = 0,
    form: QueryForm | None = None,
) -> Recipe:
    """For tensors that TMA takes; dq is contiguous, lse2 and delta are (hq, tq)."""
    from keel.kernels.hopper_bwd_dq import hopper_bwd_dq_kernel

    return launch(
        hopper_bwd_dq_kernel,
        (mask, scoring.scale, scoring.softcap, sm_margin, form),
        {
            **{"Q": q, "K": k, "V": v, "DO": dout, "DQ": dq, "DQ_OUT": dq},
            **{"LSE2": lse2, "DELTA": delta},
        },
        lambda: _prepare(dout, q, k, v, mask, scoring, dq, sm_margin, form),
    )


def choose_query_form(
    d: int,
    dim_v: int,
    bn: int,
    *,
    out_matches: bool,
    persistent: bool,
    has_softcap: bool = False,
) -> QueryForm:
    """What is compiled for head dims and blocks of bn keys; out_matches: dq has q's dtype."""
    from keel.kernels.hopper_common import QueryForm

    block_d, block_dv = block_of(d), block_of(dim_v)
    if max(d, dim_v) <= 128:
        block_d = block_dv = max(block_d, block_dv)
        stages = v_stages = 3 if bn == 64 else 2
    else:
        # 128 rows of q and dout take half of the shared memory or more: where both have 256
        # columns, it ends after two blocks of keys and one of values
        stages, v_stages = 2, 1 if block_d == block_dv else 2
    return QueryForm(
        *(block_d, block_dv, bn, d),
        stages=stages,
        v_stages=v_stages,
        staged=out_matches,
        persistent=persistent,
        has_softcap=has_softcap,
    )


def _prepare(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    dq: torch.Tensor,
    sm_margin: int,
    form: QueryForm | None,
) -> Prepared | None:
    (tq, hq, d), (tk, hk, dim_v) = q.shape, v.shape
    block_ns = BLOCK_NS if max(d, dim_v) <= 128 else WIDE_BLOCK_NS
    records = best_records(mask, block_ns if form is None else (form.bn,))
    if form is None:
        form = choose_query_form(
            *(d, dim_v, records.block_n),
            out_matches=dq.dtype == q.dtype,
            persistent=sm_margin > 0,
            has_softcap=scoring.softcap > 0,
        )
    num_tiles = len(records.tiles)
    if num_tiles * hq == 0:
        return None
    section = section_heads(hq, hk, tk * (d + dim_v) * k.element_size(), records.work, q.device)
    rows = ROWS // 2
    streamed = {
        **{"Q": describing(q, (rows, form.d)), "DO": describing(dout, (rows, form.dv))},
        **{"K": describing(k, (form.bn, form.d)), "V": describing(v, (form.bn, form.dv))},
    }
    if form.staged:
        streamed["DQ"] = describing(dq, (rows, form.d))
    grid: tuple[int, ...] = (section, num_tiles, hq // section)
    if form.persistent:
        grid = (min(num_sms(q.device) - sm_margin, num_tiles * hq),)
    return Prepared(
        grid,
        {
            **on_device(records, q.device),
            **{"scale": scoring.scale, "softcap": scoring.softcap, "tq": tq},
            **{"num_tiles": num_tiles, "section": section},
            **{"num_heads": hq, "group": hq // hk, "FORM": form},
        },
        num_warps=4,
        streamed=streamed,
        left_out=() if form.staged else ("DQ",),
    )
