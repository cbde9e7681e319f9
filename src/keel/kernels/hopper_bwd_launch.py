"""The Hopper backward from the host: what it can do, how it is compiled, what it is given."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from keel import key_order, masks
from keel._versions import for_few_registers
from keel.kernels.flash_common import l2_bytes, num_sms, score_tensors, section_heads
from keel.kernels.gradient_sums import gradient_sums
from keel.kernels.hopper_dq_launch import (
    add_dbias_in_order,
    fill_dq,
    term_flags,
    term_numbers,
)
from keel.kernels.hopper_launch import (
    block_of,
    can_be_described,
    describing,
    on_device,
    tensor_problem,
)
from keel.kernels.launch import Prepared, Recipe, launch
from keel.kernels.steps import Steps
from keel.key_records import KeyRecords, key_records
from keel.masks import AttnMask
from keel.meta import Scoring
from keel.tile_parts import end_of_last

if TYPE_CHECKING:
    from keel.kernels.hopper_forms import BackwardForm, WideForm

Floats = NDArray[np.float64]
Way = Literal["plain", "together", "apart"]
"""How dq is made: beside dk and dv, also in another order of tiles and rows, or by itself."""

MAX_TILES = 65_535
"""They are one dim of the grid, which ends there; two neighbours hold more tokens than fit one."""

HALF = 64
"""Keys of one consumer."""

NARROW = 128
"""Up to this head dim, both consumers have dk and dv of their keys in registers; above it, one has
dk and one has dv (`hopper_bwd_wide`)."""

LARGEST_WITH_FP32_BIAS = 192
"""Head dim: above it, dq takes 128 registers of a thread, and beside it fit 16 bits of a bias."""

BLOCK_BESIDE = 2.0
"""What a block of threads costs beside its blocks of rows, in those (2.6 us of an H200's SM);"""

PART_BESIDE = 5.0
"""what a part of dk and dv costs to write and to add; and"""

PARTS_BESIDE = 12.0
"""what it costs that there are parts: more launches. Fitted to documents of 4k tokens, 64:8."""

PARTS_SLOWER = 1.025
"""All of this takes so many times as long where it ends in parts: full masks of 16k and 32k."""

DOUBLE_SECTION = 0.025
"""How much longer twice as many heads at once take: for nine masks of 32:32 heads on an H200 it
finds the fastest section, or one within 3 %."""


STILL_TOGETHER = 0.7
"""Of the longest tile's work have the shortest of those that run at once, if they stay together."""

FEW_HEADS = 4
"""So many query heads of a key head, or fewer, need no order to stay together: measured on causal
masks, which gain 10 % with eight and nothing with four."""


def backward_problem(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
) -> str | None:
    """Why the Hopper backward cannot take these tensors; None if it can.

    It takes more than the forward, which knows no bias and no ALiBi.
    """
    problem = tensor_problem(q, k, v) or term_problem(scoring, k)
    if problem is not None:
        return problem
    tile_keys, _ = tile_sizes(q.shape[2], v.shape[2])
    if max(q.shape[0], k.shape[0]) > MAX_TILES * tile_keys // 2:
        return (
            f"{q.shape[0]} queries or {k.shape[0]} keys are more than {MAX_TILES * tile_keys // 2}"
        )
    if dout.dtype != q.dtype or not can_be_described(dout):
        return f"dout is {dout.dtype} with strides {dout.stride()}, it must be like q"
    return None


def term_problem(scoring: Scoring, k: torch.Tensor) -> str | None:
    """Why the Hopper backward cannot take bias or ALiBi: registers do not hold all of it."""
    tk, _, d = k.shape
    bias, slopes, offset = scoring.bias, scoring.alibi_slopes, scoring.alibi_offset
    if slopes is not None:
        if bias is not None:
            return "bias and ALiBi together are not supported"
        if offset is not None and offset.dtype != torch.int32:
            return f"alibi_offset is {offset.dtype}, it must be int32"
        if offset is not None and scoring.softcap:
            return "a softcap is not supported with an alibi_offset"
    if bias is None:
        return None
    if bias.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"a bias of {bias.dtype} is not supported (bf16, fp16 and fp32 are)"
    if bias.shape[2] != tk or (bias.stride(2) != 1 and tk > 1):
        return (
            f"bias of shape {tuple(bias.shape)} has strides {bias.stride()}: there must be {tk} "
            "keys, and the last stride must be 1"
        )
    if bias.dtype == torch.float32 and d > LARGEST_WITH_FP32_BIAS:
        return f"a bias in fp32 is not supported above head dim {LARGEST_WITH_FP32_BIAS}"
    return None


def tile_sizes(d: int, dim_v: int) -> tuple[int, int]:
    """(keys of a tile, rows of a block) for head dims."""
    block_d = max(block_of(d), block_of(dim_v))
    return (2 * HALF, HALF * NARROW // block_d) if block_d <= NARROW else (HALF, HALF)


def dq_apart(
    mask: AttnMask,
    q: torch.Tensor,
    v: torch.Tensor,
    hk: int,
    scoring: Scoring,
    *,
    deterministic: bool,
    sm_margin: int,
    outs_match: bool = True,
) -> bool:
    """Whether dq has a kernel of its own: where its order must not change, or where that is faster,
    and always for wide heads, for head dims to 64 with a softcap, and with bias or ALiBi.

    With it every score is computed twice, but nothing of dq is read and written again and again.
    outs_match: dk and dv have the dtype of q.
    """
    block_d = max(block_of(q.shape[2]), block_of(v.shape[2]))
    if block_d > NARROW or (scoring.softcap and block_d < NARROW) or _has_terms(scoring):
        return True  # no registers for it beside dk and dv
    return deterministic or _way_of(mask, q, v, hk, sm_margin, outs_match) == "apart"


def _has_terms(scoring: Scoring) -> bool:
    """Whether something is added to scores."""
    return scoring.bias is not None or scoring.alibi_slopes is not None


def _way_of(
    mask: AttnMask, q: torch.Tensor, v: torch.Tensor, hk: int, sm_margin: int, outs_match: bool
) -> Way:
    sms, l2 = num_sms(q.device) - sm_margin, l2_bytes(q.device)
    return fastest_way(*(mask, *q.shape[1:], v.shape[2], hk, sms, l2), in_order=outs_match)


@functools.lru_cache(maxsize=256)
def fastest_way(
    mask: AttnMask, hq: int, d: int, dim_v: int, hk: int, sms: int, l2: int, *, in_order: bool
) -> Way:
    """How dq is made, where it could be made in every way.

    Tiles of one document go through the query heads of a group one after the other. They stay
    together, and find rows of q, dout and dq in the L2, if they take equally long. Else each
    brings all of that from memory, which is not fast enough for dq, twice four bytes a number. Then
    an order helps in which they meet (`key_order`), if it may be changed (`in_order`) and there are
    enough tiles for each row; and else a kernel for dq alone, which has no need of the others.
    """
    if hq == hk or mask.tq * hq * (6 * d + 2 * dim_v) <= 2 * l2:
        return "plain"
    tile_keys, block_m = tile_sizes(d, dim_v)
    by_keys = key_records(mask, block_m, tile_keys)
    apart = max(block_of(d), block_of(dim_v)) == NARROW and _lose_each_other(by_keys, sms // hk)
    if in_order and (apart or hq // hk > FEW_HEADS):
        splits = _splits_for(mask, tile_keys, block_m, hk, hq // hk, sms)
        if splits == 1 and key_order.pays(by_keys.records, by_keys.tile_work, hk):
            return "together"
    return "apart" if apart else "plain"


def _lose_each_other(by_keys: KeyRecords, at_once: int) -> bool:
    """Whether tiles that run at once differ in work, and do not begin with the same rows."""
    work, tiles = by_keys.tile_work, by_keys.records.tiles
    if len(work) < 2 or work[min(len(work) - 1, at_once)] > STILL_TOGETHER * work[0]:
        return False
    first_rows = tiles[np.argsort(tiles[:, 0]), 6]
    return bool(np.mean(first_rows[1:] == first_rows[:-1]) < 0.5)


def mask_of_turns(hq: int, hk: int, d: int, dim_v: int, device: torch.device) -> AttnMask | None:
    """One for which query heads take turns, a kernel of its own; None if there is none to try."""
    sms, l2 = num_sms(device), l2_bytes(device)
    if max(d, dim_v) > NARROW:
        return None
    tried = (masks.causal(tokens) for tokens in (4096, 8192, 16384))
    shape = (hq, d, dim_v, hk, sms, l2)
    return next((x for x in tried if fastest_way(x, *shape, in_order=True) == "together"), None)


def choose_splits(tile_work: Floats, hk: int, group: int, sms: int) -> int:
    """Into how many parts the query heads that share keys are cut, a divisor of `group`.

    tile_work: blocks that each tile takes for one query head, most first. With parts, blocks of
    threads are shorter and end together, but parts of dk and dv take time to write and add up. What
    ends first is chosen, by way of the order in which the hardware starts blocks of threads.
    """
    if len(tile_work) * hk >= 16 * sms:
        return 1

    def end_with(splits: int) -> float:
        each = tile_work * (group // splits) + BLOCK_BESIDE
        if splits == 1:
            return end_of_last(np.repeat(each, hk).tolist(), sms)
        each = (each + PART_BESIDE) * PARTS_SLOWER
        return end_of_last(np.repeat(each, hk * splits).tolist(), sms) + PARTS_BESIDE

    return min((n for n in range(1, group + 1) if group % n == 0), key=end_with)


def choose_section(tile_work: Floats, lanes: int, sms: int) -> int:
    """How many lanes of one query head are worked on together, longest tiles first, where the L2
    does not hold all of them.

    tile_work: as for `choose_splits`. Few find rows of each other's tiles in the L2, but the long
    tiles of those that come last start late.
    """
    if len(tile_work) * lanes > key_order.MOST:
        return lanes
    least = key_order.lanes_that_fill(len(tile_work), lanes, sms)

    def end_with(section: int) -> float:
        each = np.tile(np.repeat(tile_work + BLOCK_BESIDE, section), lanes // section)
        return end_of_last(each.tolist(), sms) * (1 + DOUBLE_SECTION * math.log2(section))

    return min((n for n in range(least, 4 * least + 1) if lanes % n == 0), key=end_with)


@functools.lru_cache(maxsize=256)
def _splits_for(mask: AttnMask, tile_keys: int, block_m: int, hk: int, group: int, sms: int) -> int:
    """Milliseconds of Python, so only once."""
    return choose_splits(key_records(mask, block_m, tile_keys).tile_work, hk, group, sms)


def backward(
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
    dk: torch.Tensor,
    dv: torch.Tensor,
    dq32: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    apart: bool = False,
    deterministic: bool = False,
    sm_margin: int = 0,
    splits: int | None = None,
    steps: Steps | None = None,
) -> None:
    """Fills dq, dk, dv and adds to dbias, as flash_bwd.backward, for what `backward_problem` lets
    through.

    dq is added up in fp32 in an order that differs from run to run, in dq32 (tq, hq, d), which is
    full of zeros; it is made here if it is not given. With `apart` (see `dq_apart`) or
    `deterministic`, and where there is no other way, dq has a kernel of its own instead, which
    also adds to dbias. All of these are contiguous. The scale is > 0. A sink needs nothing here:
    lse2 knows of it, and its own gradient follows from lse and delta. The launches are added to
    `steps`. Without a margin of SMs they begin early (`early_launches`): rather than wait for the
    last block of threads of the one before, they take the SMs that it has left.
    """
    if 0 in (*q.shape[:2], k.shape[0]):  # nothing that a descriptor could describe
        for x in (dq, dk, dv):
            x.zero_()
        if steps is not None:
            steps.clear()
        return
    (tq, hq, d), (tk, hk, dim_v) = q.shape, v.shape
    tile_keys, block_m = tile_sizes(d, dim_v)
    by_keys = key_records(mask, block_m, tile_keys)
    if splits is None:
        sms = num_sms(q.device) - sm_margin
        splits = _splits_for(mask, tile_keys, block_m, hk, hq // hk, sms)
    if (hq // hk) % splits:
        raise ValueError(f"splits must divide the {hq // hk} query heads of a key head: {splits}")
    apart = apart or deterministic or max(d, dim_v) > NARROW or _has_terms(scoring)
    outs_match = dk.dtype == dv.dtype == q.dtype
    together = (
        not apart and splits == 1 and _way_of(mask, q, v, hk, sm_margin, outs_match) == "together"
    )
    if apart:
        dq32 = None
    elif dq32 is None:
        dq32 = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    parts = {}
    if splits > 1:
        sizes = {"DK_OUT": (tk, hk * splits, d), "DV_OUT": (tk, hk * splits, dim_v)}
        for name, size in sizes.items():
            parts[name] = torch.empty(size, dtype=torch.float32, device=q.device)
    dk_out, dv_out = parts.get("DK_OUT", dk), parts.get("DV_OUT", dv)
    given = (dout, q, k, v)
    dout, q, k, v = map(_for_tma, given)
    rows = (lse2, delta)
    launched = [
        _launch(
            *(dout, q, k, v, *rows, mask, by_keys, scoring, splits, sm_margin, together),
            *(dq32, dk_out, dv_out),
        )
    ]
    if apart:
        in_order = dbias is not None and deterministic and dbias.shape != (hq, tq, tk)
        if dbias is not None and in_order:
            add_dbias_in_order(dbias, dout, q, k, v, *rows, mask, scoring, sm_margin)
        launched.append(
            fill_dq(
                *(dout, q, k, v, *rows, mask, scoring),
                dq=dq,
                dbias=None if in_order else dbias,
                sm_margin=sm_margin,
                early=not in_order,
            )
        )
    if splits > 1 or not apart:
        launched.append(
            gradient_sums(dq32, dq, dk_out, dk, dv_out, dv, scoring.scale, splits, early=True)
        )
    if steps is not None:
        for recipe in launched:
            steps.add(recipe, **parts)
        if any(x is not y for x, y in zip(given, (dout, q, k, v), strict=True)):
            steps.clear()  # copies are more than launches


def _for_tma(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where TMA cannot take it."""
    return x if x.data_ptr() % 16 == 0 and 0 not in x.stride() else x.contiguous().clone()


def _launch(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse2: torch.Tensor,
    delta: torch.Tensor,
    mask: AttnMask,
    by_keys: KeyRecords,
    scoring: Scoring,
    splits: int,
    sm_margin: int,
    together: bool,
    dq32: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> Recipe:
    """dk and dv are contiguous, (tk, hk * splits, dim)."""
    from keel.kernels import hopper_bwd, hopper_bwd_wide

    kernel = hopper_bwd.hopper_bwd_kernel
    if max(q.shape[2], v.shape[2]) > NARROW:
        kernel = hopper_bwd_wide.hopper_bwd_wide_kernel
    return launch(
        kernel,
        (mask, scoring.scale, scoring.softcap, splits, sm_margin, together),
        {
            **{"Q": q, "K": k, "V": v, "DO": dout, "LSE2": lse2, "DELTA": delta, "DQ32": dq32},
            **{"DK": dk, "DV": dv, "DK_OUT": dk, "DV_OUT": dv, **score_tensors(scoring)},
        },
        lambda: _prepare(
            *(q, k, v, dout, by_keys, scoring, splits, sm_margin, together, dq32, dk, dv)
        ),
    )


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    by_keys: KeyRecords,
    scoring: Scoring,
    splits: int,
    sm_margin: int,
    together: bool,
    dq32: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> Prepared | None:
    (tq, hq, d), (tk, hk, dim_v) = q.shape, v.shape
    margin, with_dq = sm_margin > 0, dq32 is not None
    form = choose_backward_form(
        *(d, dim_v),
        outs_match=dk.dtype == dv.dtype == q.dtype,
        persistent=margin,
        with_dq=with_dq,
        # what stays has no registers to read runs ahead, so it is compiled for turns, long ones
        together=together or (margin and with_dq),
        has_softcap=scoring.softcap > 0,
        **term_flags(scoring),
    )
    lanes = hk * splits
    heads_each = hq // lanes
    if lanes == 0:
        return None
    records = by_keys.records
    lane_bytes = tq * heads_each * (d + dim_v) * q.element_size()
    section = section_heads(lanes, lanes, lane_bytes, records.work, q.device)
    num_tiles, l2, sms = len(records.tiles), l2_bytes(q.device), num_sms(q.device) - sm_margin
    if with_dq and hq == lanes == hk and section == lanes and lanes * lane_bytes > l2 // 2:
        section = choose_section(by_keys.tile_work, lanes, sms)
    streamed = {
        **{"Q": describing(q, (form.bm, form.d)), "DO": describing(dout, (form.bm, form.dv))},
        **{"K": describing(k, (HALF, form.d)), "V": describing(v, (HALF, form.dv))},
    }
    wide = max(d, dim_v) > NARROW
    left_out = ["DQ32"] if wide else []  # no argument there
    if dq32 is not None:
        streamed["DQ32"] = describing(dq32, (HALF, HALF))
    if form.staged:
        streamed |= {"DK": describing(dk, (HALF, form.d)), "DV": describing(dv, (HALF, form.dv))}
    else:
        left_out += ["DK", "DV"]
    grid: tuple[int, ...] = (section, num_tiles, lanes // section)
    if form.together:
        if together:
            work = by_keys.tile_work
            tiles = key_order.in_order(records, work, lanes, heads_each, sms, stay=margin)
        else:
            tiles = key_order.as_usual(
                *(records, by_keys.tile_work, lanes, heads_each, section, sms)
            )
        records = replace(records, tiles=tiles)
        grid = (len(tiles),)
    if form.persistent:
        grid = (min(sms, num_tiles * lanes),)
    return Prepared(
        grid,
        {
            **on_device(records, q.device, "KEY"),
            **{"scale": scoring.scale, "softcap": scoring.softcap, "tq": tq, "FORM": form},
            **{"splits": splits, "heads_each": heads_each, "num_lanes": lanes},
            **{"num_tiles": num_tiles, "section": section, **term_numbers(scoring, hq, tq, tk)},
            **({} if wide else {"turn": key_order.TURN if together else key_order.NO_TURNS}),
        },
        num_warps=4,
        hopper=True,
        early=not form.persistent,
        options=compile_options(form),
        streamed=streamed,
        left_out=tuple(left_out),
    )


def compile_options(form: BackwardForm | WideForm) -> dict[str, Any]:
    """Of forms whose loops would spill without them; others would with them."""
    return for_few_registers() if form.crowded else {}


def choose_backward_form(
    d: int,
    dim_v: int,
    *,
    outs_match: bool,
    persistent: bool,
    with_dq: bool,
    together: bool = False,
    **scores: bool,
) -> BackwardForm | WideForm:
    """What is compiled for head dims; outs_match: dk and dv have the dtype of q.

    scores: has_softcap, and those of `term_flags`.
    """
    from keel.kernels.hopper_forms import BackwardForm, WideForm

    if max(d, dim_v) > NARROW:
        return WideForm(
            *(block_of(d), block_of(dim_v), d, dim_v),
            persistent=persistent,
            **scores,
        )
    block_d = max(block_of(d), block_of(dim_v))
    softcap, bias = (scores.get(name, False) for name in ("has_softcap", "has_bias"))
    # where addresses in shared memory would be kept on the stack
    crowded = softcap or (persistent and with_dq)
    # where loops would spill with Triton 3.9
    stays = softcap and bias and not outs_match
    return BackwardForm(
        *(block_d, HALF * NARROW // block_d, d, dim_v),
        staged=outs_match and not crowded,
        persistent=persistent or stays,
        with_dq=with_dq,
        together=together,
        **scores,
    )
