"""Blocks of keys in the Hopper forward: what one consumer does with their scores and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from keel.kernels.hopper_common import (
    FAR,
    HALF,
    anew,
    capped,
    hide,
    lane_sums,
    mark,
    pass_turn,
    phase_of,
    row_max,
    stage_of,
    take_turn,
)
from keel.kernels.hopper_places import K_FULL, V_FREE, V_FULL, wait_at

# fmt: off

LATITUDE = gl.constexpr(8.0)
"""By so many powers of two may a row's highest score rise before its sums are scaled anew, where
forms are `lazy`: probabilities are 256 at most, which fp16 holds, and no less exact."""


@gluon.jit
def needed(needs, half, cid, form: gl.constexpr):
    """What a consumer needs of a block: 1 for its first half, 2 for the second, 3 for both.

    Blocks of 64 keys are their own first half.
    """
    first = (needs >> (16 * cid)) & 255
    end = (needs >> (16 * cid + 8)) & 255
    need = ((first <= half) & (half < end)).to(gl.int32)
    if form.BN > HALF:
        need += 2 * ((first <= half + 1) & (half + 1 < end)).to(gl.int32)
    return need


@gluon.constexpr_function
def scores_layout(keys, form):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[form.warps, 1], instr_shape=[16, keys, 16])


@gluon.jit
def panels_of(memory, number, ROWS: gl.constexpr, form: gl.constexpr):
    """Queries or keys, number so-and-so of those in memory: as arrays of (ROWS, columns)."""
    if form.PANELS == 1:
        return (memory.index(number).reshape([ROWS, form.D]),)
    else:
        COLUMNS: gl.constexpr = form.D // form.PANELS
        return (memory.index(number * 3).reshape([ROWS, COLUMNS]),
                memory.index(number * 3 + 1).reshape([ROWS, COLUMNS]),
                memory.index(number * 3 + 2).reshape([ROWS, COLUMNS]))


@gluon.jit
def products(q, k, WHICH: gl.constexpr, form: gl.constexpr):
    """q kᵀ, under way, of the keys that `step` is to work on."""
    KEYS: gl.constexpr = form.BN if WHICH == 2 else HALF
    s = gl.zeros([form.OWN_ROWS, KEYS], gl.float32, scores_layout(KEYS, form))
    for panel in gl.static_range(form.PANELS):
        rows, keys = q[panel], k[panel]
        if WHICH != 2:
            keys = keys.slice(WHICH * HALF, HALF)
        if form.DEPTH == 0:
            s = warpgroup_mma(rows, keys.permute((1, 0)), s, use_acc=panel > 0, is_async=True)
        else:
            FIRST: gl.constexpr = form.D // 2
            REST: gl.constexpr = form.DEPTH - FIRST
            s = warpgroup_mma(rows.slice(0, FIRST, dim=1),
                              keys.slice(0, FIRST, dim=1).permute((1, 0)), s, use_acc=False,
                              is_async=True)
            s = warpgroup_mma(rows.slice(FIRST, REST, dim=1),
                              keys.slice(FIRST, REST, dim=1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def scale_of(numbers, form: gl.constexpr):
    return anew(numbers.scale) if form.CAPS_ANEW else numbers.scale


@gluon.jit
def scores(s, key, lo, hi, raw_top, numbers, form: gl.constexpr, MASKED: gl.constexpr):
    """Scores as they go into the softmax, and the highest before softcap where that is wanted."""
    if form.HAS_SOFTCAP:
        if form.WANT_MAX:
            raw = s
            if MASKED:
                raw = hide(raw, key, lo, hi, form.BITS, LANES=form.LEAST)
            raw_top = gl.maximum(raw_top, row_max(raw, form))
        s = capped(s, scale_of(numbers, form), numbers.softcap)
    if MASKED:
        s = hide(s, key, lo, hi, form.BITS, LANES=form.LEAST)
    return s, raw_top


@gluon.jit
def tops_of(s, raw_top, scale2, numbers, form: gl.constexpr):
    """Highest scores of rows as they go into the softmax, times log2(e): of this block, or with
    CAPS_TOP of all so far, where rows without a key have the lowest that there is, not -inf: a key
    with a score of -inf has it too."""
    if form.CAPS_TOP:
        return capped(raw_top, scale_of(numbers, form), numbers.softcap) * scale2
    else:
        return row_max(s, form) * scale2


@gluon.jit
def add_values(ring, acc, probs, stage, form: gl.constexpr):
    """acc += probs v, probabilities by halves of a block where blocks have halves."""
    v = ring.v.index(stage).reshape([form.BN, form.DV])
    if form.HALVES:
        acc = warpgroup_mma(probs[0], v.slice(0, HALF), acc, is_async=True)
        return warpgroup_mma(probs[1], v.slice(HALF, HALF), acc, is_async=True)
    else:
        return warpgroup_mma(probs[0], v, acc, is_async=True)


@gluon.jit
def as_operands(p, ring, form: gl.constexpr, WHICH: gl.constexpr, p_l: gl.constexpr):
    """Probabilities as `add_values` takes them, those of the other half zeros."""
    p = p.to(ring.k.dtype)
    if not form.HALVES:
        return (gl.convert_layout(p, p_l),)
    elif WHICH == 2:
        left, right = p.reshape([form.OWN_ROWS, 2, HALF]).permute((0, 2, 1)).split()
        return gl.convert_layout(left, p_l), gl.convert_layout(right, p_l)
    else:
        p = gl.convert_layout(p, p_l)
        zeros = gl.zeros([form.OWN_ROWS, HALF], ring.k.dtype, p_l)
        if WHICH == 0:
            return p, zeros
        else:
            return zeros, p


@gluon.constexpr_function
def _fade(count):
    """Numbers of a thread are of two rows, two of the one and two of the other in turns."""
    decays = [f"${2 * count + n}" for n in range(count)]
    products = " ".join(f"mul.f32 ${n}, ${n}, {x};" for n, x in enumerate(decays))
    return f"""{{
        .reg .pred fades;
        setp.neu.f32 fades, {decays[0]}, 0f3F800000;
        setp.neu.or.f32 fades, {decays[2]}, 0f3F800000, fades;
        vote.sync.any.pred fades, fades, 0xffffffff;
        @!fades bra kept;
        {products}
        kept:
        }}"""


@gluon.constexpr_function
def _fade_operands(count):
    """Each number in its own place."""
    return ",".join(["=f"] * count + [str(n) for n in range(count)] + ["f"] * count)


@gluon.jit
def fade(acc, decay, form: gl.constexpr):
    """acc · decay of each row; a warp all of whose rows have 1 passes it by."""
    COUNT: gl.constexpr = form.DV // 2
    return gl.inline_asm_elementwise(
        _fade(COUNT), _fade_operands(COUNT), [acc, decay[:, None]], dtype=gl.float32,
        is_pure=False, pack=COUNT)


@gluon.jit
def step(cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi,
         scale2, numbers, form: gl.constexpr, MASKED: gl.constexpr, WHICH: gl.constexpr,
         p_l: gl.constexpr, row_l: gl.constexpr):
    """Scores of a block of keys while the values of the block before are added up.

    top2: what is taken from scores before they go into exp2. In lazy forms it follows the highest
    score of a row in steps, and raw_top has that one, where it is wanted.
    WHICH: the half of the block that is needed, 0 or 1; 2 for all of it.
    """
    KEYS: gl.constexpr = form.BN if WHICH == 2 else HALF
    PENDING: gl.constexpr = 2 if form.HALVES else 1
    s_l: gl.constexpr = scores_layout(KEYS, form)
    srow_l: gl.constexpr = top2.type.layout
    stage = stage_of(count, form)
    phase = phase_of(count, form)
    next_stage = stage_of(count + 1, form)
    next_phase = phase_of(count + 1, form)
    k = panels_of(ring.k, next_stage, form.BN, form)
    wait_at(ring, K_FULL, next_stage, next_phase, form)
    take_turn(cid, form)
    s = products(q, k, WHICH, form)
    wait_at(ring, V_FULL, stage, phase, form)
    acc = add_values(ring, acc, probs, stage, form)
    pass_turn(cid, form)
    s = warpgroup_mma_wait(PENDING, [s])
    mark(form.KEYS_FREE + next_stage, form.CONSUMERS)
    if WHICH == 1:
        key += HALF
    s, raw_top = scores(s, key, lo, hi, raw_top, numbers, form, MASKED)
    new_top2 = gl.convert_layout(tops_of(s, raw_top, scale2, numbers, form), srow_l)
    if form.LAZY:
        if form.WANT_MAX:
            raw_top = gl.maximum(raw_top, new_top2)
        new_top2 = gl.where(new_top2 > top2 + LATITUDE, new_top2, top2)
    elif not form.CAPS_TOP:
        new_top2 = gl.maximum(top2, new_top2)
    shift = new_top2
    if MASKED:
        shift = gl.where(new_top2 == float("-inf"), 0.0, new_top2)
    p = gl.exp2(s * scale2 - gl.convert_layout(shift, gl.SliceLayout(1, s_l))[:, None])
    decay = gl.exp2(top2 - shift)
    sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None]
    sums += gl.convert_layout(lane_sums(p), sums.type.layout)
    if form.Q_BUFFERS == 1 and form.CARRIES:
        # sums too: else ptxas marks values as free 40 instructions later, 2 to 8 % slower
        acc, sums = warpgroup_mma_wait(0, [acc, sums])
    else:
        acc = warpgroup_mma_wait(0, [acc])
    mark(V_FREE + stage, form.CONSUMERS)
    probs = as_operands(p, ring, form, WHICH, p_l)
    if form.LAZY:
        acc = fade(acc, gl.convert_layout(decay, row_l), form)
    else:
        acc = acc * gl.convert_layout(decay, row_l)[:, None]
    return acc, sums, new_top2, raw_top, probs


@gluon.jit
def pass_by(cid, ring, acc, probs, count, form: gl.constexpr, p_l: gl.constexpr):
    """A block of keys of which this consumer needs nothing: the values of the block before are
    added up, and its own will be, times zeros.

    Its keys are waited for all the same, so that no phase of their barrier is missed.
    """
    stage = stage_of(count, form)
    next_stage = stage_of(count + 1, form)
    wait_at(ring, K_FULL, next_stage, phase_of(count + 1, form), form)
    mark(form.KEYS_FREE + next_stage, form.CONSUMERS)
    take_turn(cid, form)
    wait_at(ring, V_FULL, stage, phase_of(count, form), form)
    acc = add_values(ring, acc, probs, stage, form)
    pass_turn(cid, form)
    acc = warpgroup_mma_wait(0, [acc])
    mark(V_FREE + stage, form.CONSUMERS)
    nothing = gl.zeros([form.OWN_ROWS, form.BN], gl.float32, scores_layout(form.BN, form))
    return acc, as_operands(nothing, ring, form, 2, p_l)


@gluon.jit
def partial_step(cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi,
                 scale2, numbers, needs, half, form: gl.constexpr, p_l: gl.constexpr,
                 row_l: gl.constexpr):
    """`step` for what the consumer needs of a partial block."""
    if not form.SKIPS:
        return step(cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi, scale2,
                    numbers, form, True, 2, p_l, row_l)
    else:
        need = needed(needs, gl.minimum(half, FAR), cid, form)
        if need == 0:
            acc, probs = pass_by(cid, ring, acc, probs, count, form, p_l)
        else:
            if form.BN == HALF:
                acc, sums, top2, raw_top, probs = step(
                    cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi, scale2,
                    numbers, form, True, 2, p_l, row_l)
            elif need == 1:
                acc, sums, top2, raw_top, probs = step(
                    cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi, scale2,
                    numbers, form, True, 0, p_l, row_l)
            elif need == 2:
                acc, sums, top2, raw_top, probs = step(
                    cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi, scale2,
                    numbers, form, True, 1, p_l, row_l)
            else:
                acc, sums, top2, raw_top, probs = step(
                    cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi, scale2,
                    numbers, form, True, 2, p_l, row_l)
        return acc, sums, top2, raw_top, probs


# fmt: on
