"""dq of the Hopper backward in a fixed order, from the host: form, tiles, launch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from keel._versions import copies_operands
from keel.kernels.flash_common import num_sms, score_tensors, section_heads
from keel.kernels.hopper_launch import block_of, describing, on_device
from keel.kernels.launch import Prepared, Recipe, launch
from keel.masks import AttnMask
from keel.meta import Scoring
from keel.tile_records import ROWS, best_records

if TYPE_CHECKING:
    from keel.kernels.hopper_forms import QueryForm


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
    dbias: torch.Tensor | None = None,
    sm_margin: int = 0,
    form: QueryForm | None = None,
    early: bool = False,
) -> Recipe:
    """For tensors that TMA takes; dq is contiguous, lse2 and delta are (hq, tq).

    dbias, in the shape of the bias and contiguous, is added to. `early`, right behind the
    launch of dk and dv of the same call alone: see `early_launches`.
    """
    from keel.kernels.hopper_bwd_dq import hopper_bwd_dq_kernel

    return launch(
        hopper_bwd_dq_kernel,
        (mask, scoring.scale, scoring.softcap, sm_margin, form, early),
        {
            **{"Q": q, "K": k, "V": v, "DO": dout, "DQ": dq, "DQ_OUT": dq},
            **{"LSE2": lse2, "DELTA": delta, "DBIAS": dbias, **score_tensors(scoring)},
        },
        lambda: _prepare(dout, q, k, v, mask, scoring, dq, dbias, sm_margin, form, early),
    )


def add_dbias_in_order(
    dbias: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse2: torch.Tensor,
    delta: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    sm_margin: int = 0,
) -> None:
    """Of a broadcast bias without atomics: one head at a time into (1, tq, tk), then plain sums."""
    assert scoring.bias is not None
    (tq, hq, _), (tk, hk, _) = q.shape, v.shape
    bias, sums = scoring.bias.expand(hq, -1, -1), dbias.expand(hq, -1, -1)
    scratch = torch.empty(tq, 1, q.shape[2], dtype=q.dtype, device=q.device)
    for head in range(hq):
        one, kv = slice(head, head + 1), slice(head * hk // hq, head * hk // hq + 1)
        dlogits = torch.zeros(1, tq, tk, dtype=torch.float32, device=q.device)
        fill_dq(
            *(dout[:, one], q[:, one], k[:, kv], v[:, kv]),
            *(lse2[one].clone(), delta[one].clone()),  # aligned
            *(mask, replace(scoring, bias=bias[one])),
            dq=scratch,
            dbias=dlogits,
            sm_margin=sm_margin,
        )
        sums[one].add_(dlogits.sum(1, keepdim=True) if dbias.shape[1] == 1 else dlogits)


def term_flags(scoring: Scoring) -> dict[str, bool]:
    """Of a form: what is added to scores."""
    return {
        "has_bias": scoring.bias is not None,
        "has_alibi": scoring.alibi_slopes is not None,
        "has_offset": scoring.alibi_slopes is not None and scoring.alibi_offset is not None,
    }


def term_numbers(scoring: Scoring, hq: int, tq: int, tk: int) -> dict[str, int]:
    """Kernel arguments of what is added to scores; none of them where nothing is."""
    numbers = {}
    if scoring.bias is not None or scoring.alibi_slopes is not None:
        numbers["tk"] = tk
    if scoring.bias is not None:
        heads, rows, _ = scoring.bias.expand(hq, tq, tk).stride()
        numbers |= {"stride_bh": heads, "stride_bi": rows}
    return numbers


def dq_block_ns(d: int, dim_v: int, has_softcap: bool, has_terms: bool) -> tuple[int, ...]:
    """Keys of a block that registers leave room for; terms are a bias and ALiBi."""
    full = has_softcap and max(d, dim_v) > 64 and copies_operands()
    return (64,) if max(d, dim_v) > 128 or has_terms or full else (64, 128)


def choose_query_form(
    d: int,
    dim_v: int,
    bn: int,
    *,
    out_matches: bool,
    persistent: bool,
    **scores: bool,
) -> QueryForm:
    """What is compiled for head dims and blocks of bn keys; out_matches: dq has q's dtype.

    scores: has_softcap, want_dbias and those of `term_flags`.
    """
    from keel.kernels.hopper_forms import QueryForm

    block_d, block_dv = block_of(d), block_of(dim_v)
    if max(d, dim_v) <= 128:
        block_d = block_dv = max(block_d, block_dv)
        stages = v_stages = 3 if bn == 64 else 2
    else:
        # 128 rows of q and dout take half of the shared memory or more: where both have 256
        # columns, it ends after two blocks of keys and one of values. With the gradient of a bias
        # one is enough as well, and which stage it is takes registers: loops spill with Triton 3.9
        one = block_dv == 256 or scores.get("want_dbias", False)
        stages, v_stages = 2, 1 if block_d == 256 and one else 2
    has_bias = scores.get("has_bias", False)
    return QueryForm(
        *(block_d, block_dv, bn, d),
        stages=stages,
        v_stages=v_stages,
        staged=out_matches,
        # so that fewer numbers are in registers, where results are not sent by TMA
        persistent=persistent or (has_bias and not out_matches),
        **scores,
    )


def _prepare(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    dq: torch.Tensor,
    dbias: torch.Tensor | None,
    sm_margin: int,
    form: QueryForm | None,
    early: bool,
) -> Prepared | None:
    (tq, hq, d), (tk, hk, dim_v) = q.shape, v.shape
    flags, numbers = term_flags(scoring), term_numbers(scoring, hq, tq, tk)
    block_ns = dq_block_ns(d, dim_v, scoring.softcap > 0, bool(numbers))
    if dbias is not None:
        heads, rows, _ = dbias.expand(hq, tq, tk).stride()
        numbers |= {"stride_dbh": heads, "stride_dbi": rows}
    records = best_records(mask, block_ns if form is None else (form.bn,))
    if form is None:
        form = choose_query_form(
            *(d, dim_v, records.block_n),
            out_matches=dq.dtype == q.dtype,
            persistent=sm_margin > 0,
            has_softcap=scoring.softcap > 0,
            want_dbias=dbias is not None,
            **flags,
        )
    num_tiles = len(records.tiles)
    if num_tiles * hq == 0:
        return None
    section = section_heads(hq, hk, tk * (d + dim_v) * k.element_size(), records.work, q.device)
    half = ROWS // 2
    streamed = {
        **{"Q": describing(q, (half, form.d)), "DO": describing(dout, (half, form.dv))},
        **{"K": describing(k, (form.bn, form.d)), "V": describing(v, (form.bn, form.dv))},
    }
    if form.staged:
        streamed["DQ"] = describing(dq, (half, form.d))
    grid: tuple[int, ...] = (section, num_tiles, hq // section)
    if form.persistent:
        grid = (min(num_sms(q.device) - sm_margin, num_tiles * hq),)
    return Prepared(
        grid,
        {
            **on_device(records, q.device),
            **{"scale": scoring.scale, "softcap": scoring.softcap, "tq": tq},
            **{"num_tiles": num_tiles, "section": section},
            **{"num_heads": hq, "group": hq // hk, "FORM": form, **numbers},
        },
        num_warps=4,
        hopper=True,
        early=early and not form.persistent,
        streamed=streamed,
        left_out=() if form.staged else ("DQ",),
    )
