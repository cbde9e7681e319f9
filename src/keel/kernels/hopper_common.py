"""What the Hopper kernels are made of: barriers, drawn work, masks, sums (Gluon, sm_90)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from keel import tile_parts, tile_records
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
def take_turn(cid, form: gl.constexpr):
    if form.TURNS and form.ONE_CODE:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r,~{memory}", [11 + 3 * cid],
            dtype=gl.int32, is_pure=False, pack=1)
    elif form.TURNS:
        NUMBER: gl.constexpr = 11 if cid == 0 else 13 + cid
        gl.inline_asm_elementwise(
            f"bar.sync {NUMBER}, 256; mov.u32 $0, 0;", "=r,~{memory}", [],
            dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(cid, form: gl.constexpr):
    if form.TURNS and form.ONE_CODE:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r,~{memory}", [14 - 3 * cid],
            dtype=gl.int32, is_pure=False, pack=1)
    elif form.TURNS:
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
    if form.STAGES == 3:
        return count % 3
    else:
        return count & (form.STAGES - 1)


@gluon.jit
def phase_of(count, form: gl.constexpr):
    """Which of two its barrier is in; one, two, three or four stages."""
    if form.STAGES == 3:
        return (count // 3) & 1
    else:
        return (count >> (form.STAGES // 2)) & 1


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
def field(ring, slot, number: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
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
    t = s.reshape([s.shape[0], BN // 8, 8])
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
    return gl.convert_layout(t.reshape(s.shape), s.type.layout)


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
        t = gl.max(s.reshape([s.shape[0], 4, form.BN // 32, 8]), 2)
        return gl.convert_layout(gl.max(gl.max(t, 1), 1), gl.SliceLayout(1, s.type.layout))
    else:
        return gl.max(s, 1)


@gluon.jit
def lane_sums(p):
    """Row sums of each lane's own columns, (rows, 8): lanes meet at the end of the tile."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


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
