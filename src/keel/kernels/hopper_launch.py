"""The Hopper forward from the host: what it can do, how it is compiled, which tiles it gets."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton

from keel._versions import (
    constant_in_traces,
    copies_operands,
    keeps_addresses,
    knows_clusters,
    launch_stream,
    wastes_registers,
)
from keel.kernels import flash_fwd
from keel.kernels.flash_common import compute_capability, l2_bytes, num_sms, section_heads
from keel.kernels.hopper_tiles import Tiles, may_pack, meetings, tiles_for
from keel.kernels.launch import INTERPRETED, Prepared, Recipe, launch
from keel.masks import AttnMask
from keel.meta import Scoring
from keel.tile_parts import CutTiles
from keel.tile_records import PART, TileRecords, best_records

if TYPE_CHECKING:
    from keel.kernels.hopper_forms import Form

GLUON = "triton.experimental.gluon.language.nvidia.hopper"

LONG_TILE = 6144
"""Keys of a tile, on average, behind which one is long: on an H200, tiles of 8,192 that count as
long take 3 % less (64 heads) or 1 % more (16), those of 4,096 as long or 4 % more."""


def hopper_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
) -> str | None:
    """Why the Hopper forward cannot take these tensors; None if it can."""
    problem = machine_problem(q.device)
    if problem is None and (scoring.bias is not None or scoring.alibi_slopes is not None):
        problem = "bias and ALiBi are not supported"
    return problem or tensor_problem(q, k, v)


def tensor_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why no Hopper kernel can take these tensors, forward or backward; None if they can."""
    problem = machine_problem(q.device)
    if problem is not None:
        return problem
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} is not supported (bf16 and fp16 are)"
    if max(q.shape[2], v.shape[2]) > 256:
        return f"head dims are {q.shape[2]} and {v.shape[2]}, at most 256 are supported"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not can_be_described(x):
            return (
                f"{name} of shape {tuple(x.shape)} has strides {x.stride()}: the last must be 1, "
                "head dim and the others multiples of 8 numbers (16 bytes), not 0"
            )
    return None


@constant_in_traces
def machine_problem(device: torch.device) -> str | None:
    if device.type != "cuda" or compute_capability(device) != (9, 0):
        return f"{device} is not a Hopper GPU (compute capability 9.0)"
    if INTERPRETED or not _has_gluon():
        return "Triton 3.6 or newer with Gluon is needed, outside of its interpreter"
    return None


def can_be_described(x: torch.Tensor) -> bool:
    """Whether TMA can take (tokens, heads, dim) of a 16-bit dtype, where it is aligned."""
    tokens, heads, _ = x.stride()
    rows = tokens > 0 < heads and tokens % 8 == heads % 8 == 0  # expanded ones were never tried
    return rows and x.stride(2) == 1 and x.shape[2] % 8 == 0


@functools.cache
def _has_gluon() -> bool:
    try:
        return importlib.util.find_spec(GLUON) is not None
    except ImportError:
        return False


def block_ns(d: int, dv: int, has_softcap: bool) -> tuple[int, ...]:
    """Keys of a block that registers and shared memory leave room for."""
    fits = block_of(d) + block_of(dv) <= 256 or (d <= 192 and dv <= 128)
    return (64, 128) if fits and not has_softcap else (64,)


def choose_form(
    d: int,
    dv: int,
    bn: int,
    *,
    out_matches: bool,
    consumers: int = 2,
    turns: bool | None = None,
    halves: bool | None = None,
    skips: bool | None = None,
    pack: int = 1,
    **options: bool,
) -> Form:
    """What is compiled for head dims and blocks of bn keys.

    out_matches: out has the dtype of q, and a layout that TMA can write.
    consumers: 3 for tiles of 192 rows, where head dims are at most 64.
    turns, halves, skips: None for where they pay.
    pack: query heads that share a tile, where head dims are at most 128.
    """
    from keel.kernels.hopper_forms import Form

    block_d, block_dv = block_of(d), block_of(dv)
    if consumers != 2 and (consumers, block_d, block_dv) != (3, 64, 64):
        raise ValueError(
            f"consumers={consumers} with head dims {d} and {dv}: 2 go with all of them, and 3 with "
            "those up to 64"
        )
    small = can_pack(d, dv)
    if pack != 1 and (consumers != 2 or not small or not may_pack(pack)):
        raise ValueError(
            f"pack={pack} with head dims {d} and {dv} and {consumers} consumers: powers of two up "
            f"to {PART} go with head dims up to 128 and 2 consumers"
        )
    stages = 3 if small and bn == 64 else 2
    if turns and stages != 2:
        raise ValueError(
            f"turns go with two stages, and blocks of {bn} keys have {stages}: use 128"
        )
    staged = small and block_d == block_dv and out_matches and not options.get("accumulate")
    if consumers == 3 and copies_operands():
        staged = False  # addresses would be kept on the stack
    if keeps_a_word(d, dv, pack, **options):
        staged = False  # the number of a warp would be kept there
    spools = not small and out_matches and not options.get("accumulate")
    parts = options.get("cuts") and (wastes_registers() or copies_operands())
    if block_d == block_dv == 256 and (options.get("has_softcap") or parts):
        # loops spill with Triton 3.6 where scores are capped; parts keep an address on the stack
        spools = False
    if skips is None:
        # elsewhere there are no registers for it: loops spill with Triton 3.6
        added = options.get("accumulate", False) and dv == block_dv
        whole = options.get("want_max", False) or not options.get("cuts")
        skips = (staged or spools or added) and whole and _can_skip(d, dv, bn, pack)
    columns = 192 if 128 < d <= 192 else block_d  # see `Form.panels`
    form = Form(
        *(columns, block_dv, bn),
        stages=stages,
        q_buffers=2 if small else 1,
        staged=staged,
        spools=spools,
        columns=dv if dv < block_dv else 0,
        depth=depth_of(d),
        consumers=consumers,
        turns=(small or bn == 128) and stages == 2 if turns is None else turns,
        halves=(bn, consumers) == (128, 2) if halves is None else halves,
        skips=skips,
        pack=pack,
        **options,
    )
    if form.one_code and (block_d, block_dv, bn) == (128, 128, 64) and not form.has_softcap:
        # tiny documents are up to 6 % faster; with a softcap, full masks are 2 % slower
        return dataclasses.replace(form, stages=4)
    return form


def keeps_a_word(
    d: int, dv: int, pack: int, cuts: bool = False, want_max: bool = False, **_others: bool
) -> bool:
    """Whether a form whose out leaves by TMA may keep a word on the stack: two do with Triton
    3.7, and four others with 3.8, capped, of which two have head dims that do not fill their
    blocks."""
    scarce = wastes_registers() or not keeps_addresses()
    size = (block_of(d), block_of(dv), pack)
    return size == (128, 128, 16) and cuts and not want_max and scarce


def can_pack(d: int, dv: int) -> bool:
    """Whether queries have two buffers: the producer must raise the max logits of packed heads."""
    return block_of(d) + block_of(dv) <= 256


def _can_skip(d: int, dv: int, bn: int, pack: int = 1) -> bool:
    """Few tokens share a tile where heads are packed: both consumers need about the same keys."""
    large = block_of(d) + block_of(dv) == 256 or (d > 128 and dv > 64 and bn == 128)
    return large and pack == 1 and bn in block_ns(d, dv, False)


def depth_of(d: int) -> int:
    """Columns of a block of 128 that hold all of a head, the first half and a power of two more: 80
    or 96; 0 where that is all of them, or blocks are others."""
    if d <= 64:
        return 0
    depth = 64 + max(16, triton.next_power_of_2(d - 64))
    return depth if depth < 128 else 0


def block_of(dim: int) -> int:
    """Columns of a block in shared memory; those beyond a head are read as zeros."""
    return max(64, triton.next_power_of_2(dim))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None = None,
    accumulate: bool = False,
    sm_margin: int = 0,
    form: Form | None = None,
) -> Recipe:
    """As flash_fwd.forward, for what `hopper_problem` lets through."""
    if k.shape[0] == 0:  # nothing that a descriptor could describe
        return flash_fwd.forward(
            *(q, k, v, mask, scoring),
            out=out,
            lse=lse,
            max_logits=max_logits,
            accumulate=accumulate,
        )
    from keel.kernels.hopper_fwd import hopper_fwd_kernel

    # torch's own allocations are aligned, so out always is
    q, k, v = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v))
    fits = not wastes_registers()
    cuts_fit = fits or max_logits is None
    tiles = _tiles_for(q, v, mask, scoring, form, three_fit=fits, cuts_fit=cuts_fit)
    return launch(
        hopper_fwd_kernel,
        (mask, scoring.scale, scoring.softcap, accumulate, sm_margin, form),
        {
            **{"Q": q, "K": k, "V": v, "O": out, "OUT": out, "LSE": lse},
            **{"MAX_LOGITS": max_logits, "SINK": scoring.sink},
            **{"COUNTER": work_counter(0, q.device)},
            **between_parts(_numbers_between(tiles, q, v), q.device),
        },
        lambda: _prepare(
            *(q, k, v, tiles, scoring, out, max_logits, accumulate, sm_margin, form),
        ),
    )


def _tiles_for(
    q: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    form: Form | None,
    *,
    three_fit: bool = True,
    cuts_fit: bool = True,
) -> Tiles:
    """Of what has registers.

    three_fit: for three consumers.
    cuts_fit: for parts of tiles where scores are capped and heads have more than 192 columns.
    """
    if form is not None and not form.cuts:
        records = best_records(mask, (form.bn,), form.tokens)
        return Tiles(records, form.consumers, pack=form.pack)
    (_, heads, d), (_, kv_heads, dv), softcap = q.shape, v.shape, scoring.softcap > 0
    columns = block_of(d) + block_of(dv)
    return tiles_for(
        *(mask, block_ns(d, dv, softcap) if form is None else (form.bn,), heads),
        group=heads // kv_heads if can_pack(d, dv) else 1,
        sms=num_sms(q.device),
        skips=_can_skip(d, dv, 128) if form is None else form.skips,
        can_be_wide=form is None and columns == 128 and not softcap and three_fit,
        can_be_cut=cuts_fit or not softcap or min(d, dv) <= 192,
        pack=None if form is None else form.pack,
    )


def has_long_tiles(records: TileRecords) -> bool:
    """Whether results that are carried, of 256 columns, are written as they lie: that takes longer,
    but the loops of such kernels are faster."""
    return records.work.total * records.block_n > LONG_TILE * records.work.tiles


def can_be_paced(form: Form) -> bool:
    """Head dims 128 and 256, where it was timed; others would be right as well."""
    plain = not (form.has_sink or form.has_softcap or form.accumulate or form.cuts)
    filled = form.d == form.dv >= 128 and not (form.columns or form.depth)
    return plain and filled and form.pack == 1 and (form.at_once or form.spools)


def can_be_paired(form: Form, group: int) -> bool:
    """Whether query heads of one key head, `group` of them, share keys and values by twos.

    Parts of tiles are for idle GPUs, and packed heads share what they read already. With Triton
    3.9, queries of 256 columns with fewer of values would keep a number on the stack.
    """
    scarce = copies_operands() and form.d == 256 > form.dv
    plain = form.pack == 1 and not form.cuts
    return group % 2 == 0 and plain and not scarce and knows_clusters()


def pays_to_pace(records: TileRecords, key_bytes: int, device: torch.device) -> bool:
    """Whether tiles are about even, and each reads more keys and values than the L2 holds."""
    work = records.work
    bytes_read = work.total * records.block_n * key_bytes
    return work.is_even and bytes_read > work.tiles * l2_bytes(device)


def _matches(out: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether out has the dtype of q, and a layout that TMA can write."""
    return out.dtype == q.dtype and can_be_described(out)


def _numbers_between(tiles: Tiles, q: torch.Tensor, v: torch.Tensor) -> int:
    return 0 if tiles.cut is None else tiles.cut.numbers_between(q.shape[1], block_of(v.shape[2]))


def between_parts(
    numbers: int, device: torch.device, stream: int | None = None
) -> dict[str, torch.Tensor | None]:
    """Where parts of tiles leave so many fp32 numbers, and where they meet; nothing for none.

    stream: from `launch_stream`, if it is known.
    """
    if numbers == 0:
        return {"PARTS": None, "MEETINGS": None}
    parts = torch.empty(numbers, dtype=torch.float32, device=device)
    if stream is None:
        stream = _stream_of(device)
    return {"PARTS": parts, "MEETINGS": meetings(device, stream)}


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Tiles,
    scoring: Scoring,
    out: torch.Tensor,
    max_logits: torch.Tensor | None,
    accumulate: bool,
    sm_margin: int,
    form: Form | None,
) -> Prepared | None:
    hq, d = q.shape[1:]
    tk, hk, dv = v.shape
    records, cut = tiles.records, tiles.cut
    if form is None:
        form = choose_form(
            *(d, dv, records.block_n),
            out_matches=_matches(out, q),
            consumers=tiles.consumers,
            has_sink=scoring.sink is not None,
            has_softcap=scoring.softcap > 0,
            want_max=max_logits is not None,
            accumulate=accumulate,
            cuts=cut is not None,
            pack=tiles.pack,
        )
        if form.q_buffers == 1 and form.carries and has_long_tiles(records):
            form = dataclasses.replace(form, spools=False)
        if can_be_paced(form) and pays_to_pace(records, (d + dv) * k.element_size(), q.device):
            form = dataclasses.replace(form, paced=True)
        # beside other kernels, SMs that are free need not be neighbours
        if sm_margin == 0 and can_be_paired(form, hq // hk):
            form = dataclasses.replace(form, paired=True)
    elif cut is None:
        form = dataclasses.replace(form, cuts=False)
    pair = 2 if form.paired else 1
    heads = hq // form.pack  # of work: those of keys, if packed
    num_work = len(records.tiles) * heads // pair
    if num_work == 0:
        return None
    section = heads  # longest tiles of all heads first, as cuts are chosen for
    if cut is None:
        head_bytes = tk * (d + dv) * k.element_size()
        section = section_heads(heads, hk, head_bytes, records.work, q.device) // pair
    streamed = {
        "Q": describing(q, (form.own_rows // form.pack, form.d // form.panels), form.pack),
        "K": describing(k, (form.bn, form.d // form.panels)),
        "V": describing(v, (form.bn, form.dv)),
    }
    left_out: tuple[str, ...] = ("O",)
    if form.staged or form.spools:
        box = (form.sent_rows // form.pack, form.dv)
        streamed["O"], left_out = describing(out, box, form.pack), ()
    return Prepared(
        (min((num_sms(q.device) - sm_margin) // pair, num_work),),
        {
            **on_device(records, q.device),
            **({} if cut is None else {"SHARES": shares_on_device(cut, q.device)}),
            **{"most_parts": 1 if cut is None else cut.most_parts},
            **{"scale": scoring.scale, "softcap": scoring.softcap},
            **{"num_tiles": len(records.tiles), "section": section, "num_heads": heads},
            **{"group": heads // hk, "num_work": num_work, "FORM": form},
            **(factors(len(records.tiles), section, heads // hk) if form.by_factors else {}),
            **{"stride_ot": out.stride(0), "stride_oh": out.stride(1)},
        },
        num_warps=form.warps,
        check=functools.partial(check_compiled, form),
        cluster=pair,
        hopper=True,
        streamed=streamed,
        left_out=(*left_out, *(("PARTS", "MEETINGS") if cut is None else ())),
        numbers_between=_numbers_between(tiles, q, v),
    )


def factors(num_tiles: int, section: int, group: int) -> dict[str, int]:
    """What the producer multiplies by, and how far it shifts, in place of divisions."""
    divisors = {"all": num_tiles * section, "section": section, "group": group}
    found = {name: as_factor(divisor) for name, divisor in divisors.items()}
    return {
        **{f"{name}_factor": factor for name, (factor, _) in found.items()},
        **{f"{name}_shift": shift for name, (_, shift) in found.items()},
    }


def as_factor(divisor: int) -> tuple[int, int]:
    """(factor, shift): for 0 <= n < 2^31, n // divisor is n times the factor, shifted to the right.

    The factor has 32 bits, here those of a negative number.

    >>> factor, shift = as_factor(7)
    >>> [n * (factor + 2**32) >> shift for n in (0, 6, 7, 2**31 - 1)] == [0, 0, 1, 306783378]
    True
    """
    bits = (divisor - 1).bit_length()
    return -(-(1 << (31 + bits)) // divisor) - (1 << 32), 31 + bits


def check_compiled(form: Form, compiled: Any) -> None:
    """Whether shared memory lies where `hopper_places` looks for it (its `set_up` tells); where
    two consumers run the same code, that no barrier stops all of their warps in a tile, and none of
    Triton's own is one of theirs; and of pairs, that all threads meet, and descriptors are where
    `hopper_pairs` takes them."""
    begun = re.findall(r"mbarrier\.init[^\n]*@global_smem(?:, i\d+ (\d+))?", compiled.asm["llir"])
    shared = [form.keys_at, form.values_at] if form.paired else []
    found = [int(place or 0) for place in begun]
    expected = [form.queries_at, *shared, form.places_at]
    _, products, behind = compiled.asm["ptx"].partition("wgmma.mma_async")
    taken = _named_barriers(compiled.asm["ptx"])
    problem = None
    if found != expected:
        arrays = "queries, keys, values" if form.paired else "queries"
        problem = f"has {arrays} and barriers at {found} of shared memory, not at {expected}"
    elif not products:
        problem = "has no products that could be found"
    elif form.one_code and re.search(r"bar(rier)?\.(cta\.)?sync(\.aligned)?\s+0\b", behind):
        problem = "stops all warps in a tile"
    elif form.one_code and not taken:
        problem = "has no named barriers that could be found"
    elif form.one_code and max(taken) >= form.meeting:
        problem = (
            f"lets Triton take named barrier {max(taken)}; consumers have them from {form.meeting}"
        )
    elif form.paired:
        problem = _pair_problem(form, compiled.asm["ptx"])
    if problem is not None:
        raise RuntimeError(
            f"the Hopper forward as compiled by Triton {triton.__version__} {problem}: nothing was "
            "launched. Use backend='triton', and please report this"
        )


def _pair_problem(form: Form, ptx: str) -> str | None:
    threads = re.search(r"\.reqntid (\d+)", ptx)
    expected = 32 * (form.arrivals + 4)
    if threads is None or int(threads[1]) != expected:
        return f"has {threads[1] if threads else 'no number of'} threads, not {expected}"
    for number in (form.keys_parameter, form.values_parameter):
        if f" hopper_fwd_kernel_param_{number}[128]" not in ptx:
            return f"has no descriptor as parameter {number}"
    return None


def _named_barriers(ptx: str) -> set[int]:
    """Those that Triton takes, which are written out: those of one code never are."""
    numbers = re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive)\S*\s+(\d+)\b", ptx)
    return set(map(int, numbers))


def describing(
    x: torch.Tensor, box: tuple[int, int], heads: int = 1
) -> Callable[[torch.Tensor], Any]:
    """Makes TMA descriptors of tensors (tokens, heads, dim) with the layout of x; boxes hold rows
    of so many heads.

    Later ones are copies of the first: checking each anew takes longer than a launch.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [box[0], heads, box[1]]
    layout = _layout(x.dtype, *block)
    fields = vars(TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)) | {
        "base": None  # the first tensor must not live on
    }

    def describe(other: torch.Tensor) -> Any:
        made = TensorDescriptor.__new__(TensorDescriptor)
        vars(made).update(fields)
        made.base = other
        return made

    return describe


@functools.cache
def _layout(dtype: torch.dtype, *block: int) -> Any:
    from triton.experimental.gluon import language as gl

    element = getattr(gl, str(dtype).removeprefix("torch."))
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


@functools.lru_cache(maxsize=128)
def on_device(
    records: TileRecords, device: torch.device, rows: str = "ROW"
) -> dict[str, torch.Tensor]:
    """The records as kernel arguments, copied once; bounds of rows are called `rows`_LO and _HI."""
    _check_not_capturing()
    arrays = {"TILES": records.tiles, "RUNS": records.runs}
    arrays |= {f"{rows}_LO": records.row_lo, f"{rows}_HI": records.row_hi}
    return {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}


@functools.lru_cache(maxsize=128)
def shares_on_device(cut: CutTiles, device: torch.device) -> torch.Tensor:
    _check_not_capturing()
    return torch.from_numpy(cut.shares).to(device)


def _check_not_capturing() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "this mask was never used on this device, and its tile plan cannot be copied "
            "there during CUDA graph capture: call this once before capturing"
        )


_counters: dict[tuple[int | None, int], torch.Tensor] = {}
_spare_counters: dict[int | None, list[torch.Tensor]] = {}
"""For graphs: what one has taken is its own for good."""

_taken: list[torch.Tensor] = []

NUM_SPARES = 1024
COUNTER_WIDTH = 32
"""Numbers, 128 bytes: atomics of two counters do not meet."""


def work_counter(sm_margin: int, device: torch.device, stream: int | None = None) -> torch.Tensor:
    """Where blocks of threads draw their work: a zero before and after each launch.

    Launches on one stream follow each other, so they share a counter. A graph may be replayed
    beside anything, so each of its launches gets one of its own: a spare one, or, where these have
    run out or nothing was called before, one that replays fill. `stream`: from `launch_stream`, if
    it is known.
    """
    if stream is None:
        stream = _stream_of(device)
    if stream is None:
        spares = _spare_counters.get(device.index)
        if not spares:
            return torch.zeros(1, dtype=torch.int32, device=device)
        _taken.append(spares.pop())
        return _taken[-1]
    key = (device.index, stream)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = _new_counters(1, device)[0]
        if device.index not in _spare_counters:
            _spare_counters[device.index] = _new_counters(NUM_SPARES, device)
            if device.type == "cuda":  # graphs use them on other streams
                torch.cuda.current_stream(device).synchronize()
    return counter


def _new_counters(number: int, device: torch.device) -> list[torch.Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        block = torch.zeros(number, COUNTER_WIDTH, dtype=torch.int32, device=device)
        return [row[:1] for row in block.unbind()]


def _stream_of(device: torch.device) -> int | None:
    """The current stream; None during the capture of a graph."""
    stream = launch_stream(device.index)
    if stream is None and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device).cuda_stream
    return stream
