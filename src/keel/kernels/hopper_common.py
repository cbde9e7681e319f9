"""What the Hopper kernels are made of: barriers, drawn work, masks, sums (Gluon, sm_90)."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from keel import tile_parts, tile_records
from keel._versions import holds_wide_tiles, wastes_registers
from keel.kernels.flash_common import LN2, LOG2E

# fmt: off

PART = gl.constexpr(tile_records.PART)
"""Rows of one consumer."""
HALF = gl.constexpr(tile_records.HALF)
"""Keys of half a block of 128."""
FAR = gl.constexpr(tile_records.FAR)
FIELDS = gl.constexpr(tile_records.FIELDS)
"""Numbers by which the producer tells of a tile."""
SHARE_BITS = gl.constexpr(tile_parts.SHARE_BITS)


class Constants:
    """A dataclass of these in one constexpr argument: device code sees its fields as capitals."""

    def __getattr__(self, name: str) -> Any:
        if not name.isupper():
            raise AttributeError(name)
        return gl.constexpr(getattr(self, name.lower()))

    def __str__(self) -> str:
        """Fields and properties: Triton looks for compiled kernels by this, and must not find
        those of a version in which a property had another value."""
        names = sorted(n for n, x in inspect.getmembers(type(self)) if isinstance(x, property))
        return f"{self!r} {[(name, getattr(self, name)) for name in names]}"


@dataclass(frozen=True)
class Form(Constants):
    """What a variant of the forward is compiled for."""

    d: int
    dv: int
    bn: int
    """Keys of a block."""
    stages: int = 2
    """Blocks of keys and values in shared memory."""
    q_buffers: int = 2
    """With two, the next queries come while a tile is worked on."""
    staged: bool = True
    """Results leave through shared memory, in the place of their queries, by TMA."""
    columns: int = 0
    """Of out, where fewer than dv."""
    consumers: int = 2
    """Warpgroups of 64 rows: 2 or, for head dim 64, 3."""
    halves: bool = False
    """Probabilities of a block go to the tensor cores in two parts."""
    skips: bool = False
    """Of partial blocks, consumers compute the half that they need, or nothing."""
    turns: bool = False
    """Consumers issue their products in turns, so that each has its exponentials while others have
    the tensor cores. For two stages: the barriers of a third serve for this."""
    has_sink: bool = False
    has_softcap: bool = False
    want_max: bool = False
    accumulate: bool = False
    cuts: bool = False
    """Tiles may be parts of a tile, cut along its keys, that meet when they are done."""
    pack: int = 1
    """Query heads of one key head in a tile, a power of two: see `hopper_rows`."""

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.consumers * tile_records.PART

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return self.rows // self.pack

    @property
    def pack_bits(self) -> int:
        return self.pack.bit_length() - 1

    @property
    def bits(self) -> bool:
        """Masks by bits, where there are registers for them: see `hide`."""
        return self.consumers == 2 and not self.cuts and self.d + self.dv <= 256

    @property
    def least(self) -> bool:
        """There are few registers: masks and maxima by what takes the fewest of them (see `hide`,
        `row_max`)."""
        if self.consumers == 3:
            return True
        full = (self.d, self.dv, self.columns) == (256, 256, 0)
        capped, added = self.has_softcap, self.accumulate
        # the one or the other is enough to spill with Triton 3.8, both are with 3.9
        return full and not self.cuts and (capped or (added and wastes_registers()))

    @property
    def rereads(self) -> bool:
        """Bounds of rows are read when they are needed: there are few registers."""
        return self.least or (self.q_buffers == 1 and self.has_softcap)

    @property
    def carries(self) -> bool:
        """A tile is put away when the next one has begun. With one buffer of queries that takes
        registers, and is faster only where heads fill their blocks of 256 columns."""
        if self.q_buffers == 2:
            return True
        full = (self.d, self.dv, self.columns) == (256, 256, 0)
        plain = not (self.cuts or self.accumulate or self.has_softcap)
        return full and plain and holds_wide_tiles()

    @property
    def at_once(self) -> bool:
        """Results are written as a whole, not by 64 columns."""
        return self.staged or (self.q_buffers == 1 and self.carries)

    @property
    def caps_top(self) -> bool:
        """The highest score behind softcap is made from the highest before it: one maximum of a
        block for two, but a longer way to it, which pays where heads are wide."""
        return self.has_softcap and self.want_max and self.q_buffers == 1

    @property
    def late(self) -> bool:
        """Nothing is read ahead of a run of blocks: there are no registers for it."""
        return self.q_buffers == 1

    @property
    def unhurried(self) -> bool:
        """The next tile is looked at when products are made, and fields of one are given back when
        it is put away: earlier, loops of Triton 3.6 spill. Heads that fill their blocks spill by it
        with 3.7."""
        wide = (self.d, self.dv) == (256, 256)
        return wide and self.has_softcap and self.want_max and self.cuts

    @property
    def producer_registers(self) -> int:
        """Of the 512 of four threads; the second consumer has 240, the first what is left."""
        if self.carries:
            return 32
        # which of the two leaves nothing on the stack, with Triton 3.6
        return 32 if self.has_softcap and not (self.cuts and self.dv > 64) else 24

    @property
    def tops(self) -> bool:
        """The producer raises max logits: it waits for each tile to be put away, if there are two
        buffers."""
        return self.want_max and self.q_buffers == 2


@dataclass(frozen=True)
class BackwardForm(Constants):
    """What a variant of the backward is compiled for."""

    d: int
    """Columns of blocks, 64 or 128; heads may have fewer."""
    bm: int
    """Rows of a block: 64 · 128 / d, so that each consumer makes 64 x 64 of dq."""
    dk_columns: int
    """Of heads."""
    dv_columns: int
    stages: int = 2
    """Blocks of rows in shared memory."""
    staged: bool = True
    """dk and dv leave through shared memory, in the place of their keys and values, by TMA."""
    persistent: bool = False
    """Blocks of threads stay and take one tile after the other, on fewer SMs than there are."""
    with_dq: bool = True
    """Else `hopper_bwd_dq` makes it, in a fixed order."""
    together: bool = False
    """Query heads that share keys take turns, so that tiles stay together: see `key_order`. Blocks
    of threads that stay and make dq have such records too, with turns or without."""
    has_softcap: bool = False
    has_bias: bool = False
    has_alibi: bool = False
    has_offset: bool = False
    """Rows of ALiBi stand at keys of their own."""

    @property
    def has_terms(self) -> bool:
        """Something is added to scores."""
        return self.has_bias or self.has_alibi

    @property
    def plain(self) -> bool:
        """The form of most masks and heads, where nothing else wants registers."""
        added = self.has_terms or self.has_softcap
        return self.with_dq and not (self.together or self.persistent or added)

    @property
    def reads_ahead(self) -> bool:
        """Runs of blocks, and bounds of their keys, are read while the blocks before are worked on.
        What is kept for that lies on the stack, outside of loops; without, the instructions of the
        loops come in an order that takes 5 to 10 % longer."""
        return self.plain and self.d == 128

    @property
    def crowded(self) -> bool:
        """Loops spill with Triton 3.9, but where instructions are ordered for few registers."""
        return self.has_bias and self.has_softcap and self.d == 128

    @property
    def producer_begins(self) -> bool:
        """The producer sets up barriers. Else the first consumer, which does, keeps the number of
        its thread from there: on the stack, with Triton 3.6, and loads it in the loops."""
        return self.with_dq and not (self.staged or self.persistent)

    @property
    def producer_registers(self) -> int:
        """Of the 512 of four threads; the second consumer has 240, the first what is left."""
        return 32 if self.has_offset and self.d == 64 else 24

    @property
    def dv(self) -> int:
        """Columns of blocks of values."""
        return self.d

    @property
    def parts(self) -> int:
        """Of 64 keys, in a tile."""
        return 2


@dataclass(frozen=True)
class WideForm(Constants):
    """What a variant of dk and dv for wide heads is compiled for."""

    d: int
    """Columns of blocks of queries and keys, 64 to 256; heads may have fewer."""
    dv: int
    """Of values and dout."""
    dk_columns: int
    """Of heads."""
    dv_columns: int
    stages: int = 2
    """Blocks of rows in shared memory, and of weights."""
    persistent: bool = False
    has_softcap: bool = False
    has_bias: bool = False
    has_alibi: bool = False
    has_offset: bool = False
    """Rows of ALiBi stand at keys of their own."""

    @property
    def has_terms(self) -> bool:
        """Something is added to scores."""
        return self.has_bias or self.has_alibi

    @property
    def reads_ahead(self) -> bool:
        return False

    @property
    def crowded(self) -> bool:
        """Loops spill with Triton 3.9, but where instructions are ordered for few registers."""
        return False

    @property
    def producer_begins(self) -> bool:
        return False

    @property
    def bm(self) -> int:
        """Rows of a block."""
        return tile_records.PART

    @property
    def parts(self) -> int:
        """Of 64 keys, in a tile: all are both consumers'."""
        return 1

    @property
    def together(self) -> bool:
        """Heads come one after the other: dq is apart."""
        return False

    @property
    def short(self) -> bool:
        """The last quarter of queries and keys is zeros, and left out of products."""
        return self.d == 256 and self.dk_columns <= 192

    @property
    def staged(self) -> bool:
        """dk and dv are written as they lie in registers."""
        return False

    @property
    def with_dq(self) -> bool:
        return False


@dataclass(frozen=True)
class QueryForm(Constants):
    """What a variant of dq in a fixed order is compiled for."""

    d: int
    """Columns of blocks of queries and keys, 64 to 256; heads may have fewer."""
    dv: int
    """Of values and dout."""
    bn: int
    """Keys of a block."""
    columns: int
    """Of heads."""
    stages: int = 2
    """Blocks of keys in shared memory, and"""
    v_stages: int = 2
    """of values, which are done with earlier."""
    staged: bool = True
    """dq leaves through shared memory, in the place of its queries, by TMA."""
    persistent: bool = False
    has_softcap: bool = False
    has_bias: bool = False
    has_alibi: bool = False
    has_offset: bool = False
    """Rows of ALiBi stand at keys of their own."""
    want_dbias: bool = False

    @property
    def has_terms(self) -> bool:
        """Something is added to scores."""
        return self.has_bias or self.has_alibi

    @property
    def short(self) -> bool:
        """The last quarter of queries and keys is zeros, and left out of products."""
        return self.d == 256 and self.columns <= 192


@gluon.jit
def wait_for(number, CONSUMERS: gl.constexpr = 2):
    THREADS: gl.constexpr = 32 + 128 * CONSUMERS
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.u32 $0, 0;", "=r,r,~{memory}", [number],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mark(number, CONSUMERS: gl.constexpr = 2):
    THREADS: gl.constexpr = 32 + 128 * CONSUMERS
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.u32 $0, 0;", "=r,r,~{memory}", [number],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(cid: gl.constexpr, form: gl.constexpr):
    if form.TURNS:
        NUMBER: gl.constexpr = 11 if cid == 0 else 13 + cid
        gl.inline_asm_elementwise(
            f"bar.sync {NUMBER}, 256; mov.u32 $0, 0;", "=r,~{memory}", [],
            dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(cid: gl.constexpr, form: gl.constexpr):
    if form.TURNS:
        NUMBER: gl.constexpr = 11 if cid == form.CONSUMERS - 1 else 14 + cid
        gl.inline_asm_elementwise(
            f"bar.arrive {NUMBER}, 256; mov.u32 $0, 0;", "=r,~{memory}", [],
            dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hidden_zero():
    """A zero that LLVM does not see through: it would keep addresses of operands in registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
                                     pack=1)


@gluon.jit
def unknown_zero(number):
    """A zero that ptxas does not see through either: `number`, which it cannot know, is not
    negative. What is added to it is not computed before the number is there, and kept."""
    return gl.minimum(number, 0)


@gluon.jit
def touch(place):
    """Brings what lies there into the L1."""
    gl.inline_asm_elementwise("prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l",
                              [place.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False,
                              pack=1)


@gluon.jit
def block_anew():
    """`gl.program_id(0)`, which LLVM would keep for all who want it."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32,
                                     is_pure=False, pack=1)


@gluon.jit
def blocks_anew():
    """`gl.num_programs(0)`, likewise."""
    return gl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=gl.int32,
                                     is_pure=False, pack=1)


@gluon.jit
def scores(a, b, zero, SHORT: gl.constexpr):
    """a bᵀ, under way; of 256 columns 192, if SHORT."""
    if SHORT:
        s = warpgroup_mma(a.slice(0, 128, dim=1), b.slice(0, 128, dim=1).permute((1, 0)), zero,
                          use_acc=False, is_async=True)
        return warpgroup_mma(a.slice(128, 64, dim=1), b.slice(128, 64, dim=1).permute((1, 0)), s,
                             is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def zero_sums(COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    return gl.zeros([PART, COLUMNS], gl.float32, layout)


@gluon.jit
def no_sums(D: gl.constexpr, SHORT: gl.constexpr):
    """Zeros for 64 rows: of all columns, or if SHORT of 128 and of 64, a power of two each."""
    if SHORT:
        return zero_sums(128), zero_sums(64)
    else:
        return (zero_sums(D),)


@gluon.jit
def add_product(a, b, sums, SHORT: gl.constexpr):
    """sums += a b, complete; a in registers."""
    a_l: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=sums[0].type.layout, k_width=2)
    a0 = gl.convert_layout(a, a_l)
    if SHORT:
        b_l: gl.constexpr = gl.DotOperandLayout(
            operand_index=0, parent=sums[1].type.layout, k_width=2)
        first = warpgroup_mma(a0, b.slice(0, 128, dim=1), sums[0], is_async=True)
        rest = warpgroup_mma(gl.convert_layout(a, b_l), b.slice(128, 64, dim=1), sums[1],
                             is_async=True)
        first, rest = warpgroup_mma_wait(0, [first, rest])
        return (first, rest)
    else:
        total = warpgroup_mma(a0, b, sums[0], is_async=True)
        return (warpgroup_mma_wait(0, [total]),)


@gluon.jit
def stage_of(count, form: gl.constexpr):
    """Where block number `count` lies."""
    if form.STAGES == 2:
        return count & 1
    else:
        return count % form.STAGES


@gluon.jit
def phase_of(count, form: gl.constexpr):
    if form.STAGES == 2:
        return (count >> 1) & 1
    else:
        return (count // form.STAGES) & 1


@gluon.jit
def as_offset(stride):
    """A stride or a row, not negative, in 64 bits. Signs of 32 bits would be extended before all
    tiles, and kept in registers that are needed, or spilled."""
    stride = gl.to_tensor(stride)
    if stride.dtype == gl.int32:
        return stride.to(gl.uint32, bitcast=True).to(gl.int64)
    else:
        return stride


@gluon.jit
def as_logits(tops, form: gl.constexpr):
    """Maxima of rows as consumers have them: times log2(e), unless scores are capped."""
    if form.HAS_SOFTCAP:
        return tops
    else:
        return tops * LN2


@gluon.jit
def raise_max(POINTER, value):
    """Raises one float to the highest of 64, two in each lane; otherwise as in flash_common.

    One `red` of a warp, without a look at what is there already: no load to wait for.
    """
    zeros = gl.full(value.shape, 0, gl.int32, value.type.layout)
    place = (POINTER + zeros).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        """{
        .reg .pred first, negative, positive;
        .reg .b32 bits, other, flip, lane;
        add.f32 bits, $4, 0f00000000;
        add.f32 other, $5, 0f00000000;
        shr.s32 flip, bits, 31;
        and.b32 flip, flip, 0x7fffffff;
        xor.b32 bits, bits, flip;
        shr.s32 flip, other, 31;
        and.b32 flip, flip, 0x7fffffff;
        xor.b32 other, other, flip;
        max.s32 bits, bits, other;
        redux.sync.max.s32 bits, bits, 0xffffffff;
        shr.s32 flip, bits, 31;
        and.b32 flip, flip, 0x7fffffff;
        xor.b32 bits, bits, flip;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        setp.lt.and.s32 negative, bits, 0, first;
        setp.ge.and.s32 positive, bits, 0, first;
        @positive red.relaxed.gpu.global.max.s32 [$2], bits;
        @negative red.relaxed.gpu.global.min.u32 [$2], bits;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        }""", "=r,=r,l,l,f,f", [place, value], dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def publish(ring, slot, number: gl.constexpr, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.fields.index(slot * FIELDS + number).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def field(ring, slot, number: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(ring.fields.index(slot * FIELDS + number).load(layout), 0)


@gluon.jit
def draw(COUNTER):
    """Lane 0 draws a number, which may take its time to come: `told` waits for it."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.global.gpu.relaxed.add.u32 $0, [$1], 1;
        }""", "=r,l,~{memory}", [COUNTER.to(gl.int64, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def told(number):
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r",
                                     [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def work_of(turn):
    """What a block of threads takes next without asking: from left to right, then back.

    Work is sorted, most first: who had the most of one turn has the least of the next.
    """
    grid = blocks_anew()
    place = block_anew()
    return turn * grid + gl.where((turn & 1) == 1, grid - 1 - place, place)


@gluon.jit
def place_of(work, num_tiles, section, KEEPS: gl.constexpr = False):
    """(tile, head): heads in sections that share the L2; inside a section, longest tiles first.

    KEEPS: work of a section may be kept for all tiles; else it would be, on the stack.
    """
    work_each = num_tiles * section if KEEPS else (num_tiles + hidden_zero()) * section
    in_section = work % work_each
    head = (work // work_each) * section + in_section % section
    return in_section // section, head


@gluon.jit
def hide(s, key, lo, hi, BITS: gl.constexpr, INSTEAD: gl.constexpr = float("-inf"),
         LANES: gl.constexpr = False):
    """Scores of keys outside of [lo, hi) to -inf.

    A thread holds every eighth pair of columns. Seen as (rows, BN / 8, 8), the middle index is a
    constant of each register, so that a bound costs one compare with an immediate. With BITS, each
    row and inner column has a number with a bit for each of them, and a score costs one test and
    one choice, half as much. Some forms have no registers for that; with LANES, what is compared
    takes the fewest.
    """
    BN: gl.constexpr = s.shape[1]
    t = s.reshape([PART, BN // 8, 8])
    L: gl.constexpr = t.type.layout
    octet = gl.arange(0, BN // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    inner = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :]
    row_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, L))
    if LANES:
        inner = pair_of_lane(inner)
    low = (gl.convert_layout(lo, row_l) - key)[:, None] - inner
    high = (gl.convert_layout(hi, row_l) - key)[:, None] - inner
    if BITS:
        # In one piece: else ptxas would test all bits before the scores are there, and then have
        # no place for so many answers.
        bits = bits_between((low + 7) >> 3, (high + 7) >> 3)
        instead = gl.full(t.shape, INSTEAD, gl.float32, L)
        t = gl.inline_asm_elementwise(
            """{
            .reg .pred inside;
            .reg .b32 bit;
            and.b32 bit, $3, $4;
            setp.ne.b32 inside, bit, 0;
            selp.f32 $0, $1, $2, inside;
            }""", "=f,f,f,r,r", [t, instead, bits[:, None, :], 1 << octet], dtype=gl.float32,
            is_pure=True, pack=1)
    elif LANES:
        instead = gl.full(t.shape, INSTEAD, gl.float32, L)
        t = gl.inline_asm_elementwise(
            """{
            .reg .pred inside;
            setp.ge.s32 inside, $3, $4;
            setp.lt.and.s32 inside, $3, $5, inside;
            selp.f32 $0, $1, $2, inside;
            }""", "=f,f,f,r,r,r", [t, instead, 8 * octet, low[:, None, :], high[:, None, :]],
            dtype=gl.float32, is_pure=True, pack=1)
    else:
        keep = (8 * octet >= low[:, None, :]) & (8 * octet < high[:, None, :])
        t = gl.where(keep, t, INSTEAD)
    return gl.convert_layout(t.reshape([PART, BN]), s.type.layout)


@gluon.jit
def pair_of_lane(inner):
    """inner, a thread's two of eight columns, from the number of its lane, read anew: else what is
    known of the thread stays in a register through loops that have none left."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 3;
        mad.lo.s32 $0, lane, 2, $1;
        }""", "=r,r", [inner & 1], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bits_between(first, end):
    """Ones from bit `first` to before bit `end`; both may lie outside of the 32."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 from, width;
        max.s32 from, $1, 0;
        sub.s32 width, $2, from;
        max.s32 width, width, 0;
        bmsk.clamp.b32 $0, from, width;
        }""", "=r,r,r", [first, end], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def row_max(s, form: gl.constexpr):
    """Highest score of each row.

    `gl.max` goes through a thread's 32 columns of a row in one chain; where registers are few, it
    is eight chains of a quarter of them, that meet.
    """
    if form.LEAST:
        t = gl.max(s.reshape([PART, 4, form.BN // 32, 8]), 2)
        return gl.convert_layout(gl.max(gl.max(t, 1), 1), gl.SliceLayout(1, s.type.layout))
    else:
        return gl.max(s, 1)


@gluon.jit
def lane_sums(p):
    """Row sums of each lane's own columns, (rows, 8): lanes meet at the end of the tile."""
    return gl.sum(p.reshape([PART, p.shape[1] // 8, 8]), 1)


@gluon.jit
def capped(s, scale, softcap):
    """softcap · tanh(s · scale / softcap)."""
    return softcap - 2.0 * softcap * _half_of_rest(s, scale, softcap)


@gluon.jit
def anew(x):
    """x, of which LLVM does not know that it is the same number in each turn of a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32,
                                     is_pure=False, pack=1)


@gluon.jit
def capped_with_slope(s, scale, softcap):
    """Capped scores, and their derivative by s · scale: 1 - tanh², without a difference of two
    numbers near 1 where scores are high."""
    rest = _half_of_rest(s, scale, softcap)
    return softcap - 2.0 * softcap * rest, 4.0 * rest * (1.0 - rest)


@gluon.jit
def _half_of_rest(s, scale, softcap):
    """(1 - tanh(s · scale / softcap)) / 2; exp overflows to inf for large s: the right limit."""
    return reciprocal(1.0 + gl.exp2(s * (2.0 * LOG2E * scale / softcap)))


@gluon.jit
def reciprocal(x):
    """1 / x to a rounding step, in one instruction."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x],
                                     dtype=gl.float32, is_pure=True, pack=1)


# fmt: on
