"""What the Hopper backward adds to scores: bias and ALiBi (Gluon, sm_90).

    score = scale · q·k + bias - slope · |position of the row - key|

Consumers read the bias where it lies, while the tensor cores make the products: blocks begin at any
row and key, so TMA cannot bring it. Its keys lie side by side; strides of rows and heads are what
they are, 0 where it is broadcast. Nothing behind the end is read. Addresses have 64 bits: there are
tq · tk numbers for each head.

Distances are differences of floats, each counted from a key nearby: exact like those of integers,
where a conversion for each pair would take longer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from keel.kernels.hopper_common import PART, hidden_zero, unknown_zero

# fmt: off


class Terms(NamedTuple):
    """Pointers and numbers; None where a form does not have them."""

    BIAS: Any
    SLOPES: Any
    OFFSET: Any
    tk: Any
    stride_bh: Any
    stride_bi: Any


TERM_NUMBERS = ["tk", "stride_bh", "stride_bi"]
"""They differ from call to call."""


class Spot(NamedTuple):
    """Rows of a consumer of queries."""

    rows: Any
    row_end: Any
    """Of the tile: rows from there on are not its own."""
    head: Any
    position: Any
    """The key at which ALiBi has each row."""
    slope: Any


@gluon.jit
def slope_of(terms, form: gl.constexpr, head):
    """Of a head's ALiBi."""
    if form.HAS_ALIBI:
        return gl.load(terms.SLOPES + head).to(gl.float32)
    else:
        return 0.0


@gluon.jit
def bias_by_keys(terms, form: gl.constexpr, tq, head, key, row, MASKED: gl.constexpr,
                 layout: gl.constexpr):
    """The bias of 64 keys and a block of rows, as it is, where scores are transposed.

    Blocks that are not masked have all their rows.
    """
    keys = key + gl.arange(0, PART, gl.SliceLayout(1, layout))
    keys = gl.minimum(keys, terms.tk - 1)  # short tiles do not have all of them
    rows = row + gl.arange(0, form.BM, gl.SliceLayout(0, layout))
    column = head.to(gl.int64) * terms.stride_bh + keys
    # made anew for each block: LLVM would keep multiples of the stride, and registers are scarce
    line = rows.to(gl.int64) * (terms.stride_bi + hidden_zero())
    place = (terms.BIAS + column)[:, None] + line[None, :]
    if MASKED:
        return gl.load(place, mask=(rows < tq)[None, :], other=0.0)
    else:
        return gl.load(place)


@gluon.jit
def with_bias(s, scale, bias):
    """Scaled scores and their bias."""
    return s * scale + bias.to(gl.float32)


@gluon.jit
def difference(a, b):
    """a - b, which LLVM does not take apart."""
    return gl.inline_asm_elementwise("sub.s32 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32,
                                     is_pure=False, pack=1)


@gluon.jit
def origin_of(terms, tq, form: gl.constexpr, key):
    """The row that ALiBi has at a key, but for offsets; else that key. One number for three."""
    if form.HAS_ALIBI and not form.HAS_OFFSET:
        if form.BM == PART:  # else what comes of it is kept for all tiles, on the stack
            return difference(key, terms.tk - tq)
        else:
            return key - (terms.tk - tq)
    else:
        return key


@gluon.jit
def key_of_run(origin, form: gl.constexpr):
    """The same number; but addresses of a bias that follow from it are made for each run of blocks.
    Else they would be kept for all of them, on the stack."""
    if form.HAS_BIAS:
        return origin + hidden_zero()
    else:
        return origin


@gluon.jit
def with_alibi_by_keys(s, scale, ring, form: gl.constexpr, stage, half: gl.constexpr, row, origin,
                       slope):
    """Scaled scores (keys, rows of a half) and their ALiBi; row: the first of the block."""
    layout: gl.constexpr = s.type.layout
    first = row + half * PART - origin
    if form.HAS_SOFTCAP and form.BM > PART:  # else ptxas counts on, in a register that it lacks
        first += unknown_zero(row)
    if form.HAS_OFFSET:
        rows_l: gl.constexpr = gl.SliceLayout(0, layout)
        offset = ring.offset.index(stage).slice(half * PART, PART).load(rows_l)
        rows = (gl.arange(0, PART, rows_l) + (offset + first)).to(gl.float32)
        keys = gl.arange(0, PART, gl.SliceLayout(1, layout)).to(gl.float32)
        return s * scale - slope * gl.abs(rows[None, :] - keys[:, None])
    else:  # as in `hide`: what differs between registers is a constant
        t = s.reshape([PART, PART // 8, 8])
        L: gl.constexpr = t.type.layout
        octet = 8 * gl.arange(0, PART // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))
        inner = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
        keys = gl.arange(0, PART, gl.SliceLayout(1, gl.SliceLayout(1, L)))
        near = ((first + inner)[None, :] - keys[:, None]).to(gl.float32)
        distance = gl.abs(near[:, None, :] + octet.to(gl.float32)[None, :, None])
        t = t * scale - slope * distance
        return gl.convert_layout(t.reshape([PART, PART]), layout)


@gluon.jit
def spot_of(terms, tq, form: gl.constexpr, head, rows, row_end):
    position = 0
    if form.HAS_OFFSET:
        position = rows + gl.load(terms.OFFSET + rows, mask=rows < tq, other=0)
    elif form.HAS_ALIBI:
        position = rows + (terms.tk - tq)
    return Spot(rows, row_end, head, position, slope_of(terms, form, head))


@gluon.jit
def bias_by_rows(terms, tq, form: gl.constexpr, spot, key, MASKED: gl.constexpr,
                 layout: gl.constexpr):
    """The bias of 64 rows and a block of keys, as it is.

    Rows may be another tile's, or there may be none; blocks that are not masked have all their
    keys.
    """
    COLUMNS: gl.constexpr = form.BN
    t = gl.zeros([PART, COLUMNS], gl.float32, layout).reshape([PART, COLUMNS // 8, 8])
    L: gl.constexpr = t.type.layout  # octets are constants in addresses, of no register
    row_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, L))
    octet = 8 * gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    inner = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :]
    rows = gl.convert_layout(gl.minimum(spot.rows, tq - 1), row_l).to(gl.int64)
    line = spot.head.to(gl.int64) * terms.stride_bh + key  # made anew each time, as above
    line += rows * (terms.stride_bi + hidden_zero())
    place = ((terms.BIAS + line)[:, None] + inner)[:, None, :] + octet
    if MASKED:
        left = (difference(terms.tk, key) - inner)[:, None, :]
        bias = gl.load(place, mask=octet < left, other=0.0)
    else:
        bias = gl.load(place)
    return gl.convert_layout(bias.reshape([PART, COLUMNS]), layout)


@gluon.jit
def with_alibi_by_rows(s, scale, spot, key):
    """Scaled scores (rows, keys) and their ALiBi."""
    COLUMNS: gl.constexpr = s.shape[1]
    t = s.reshape([PART, COLUMNS // 8, 8])  # as in `hide`: octets are constants, of no register
    L: gl.constexpr = t.type.layout
    octet = 8 * gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    inner = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    rows = gl.convert_layout(spot.position, gl.SliceLayout(1, gl.SliceLayout(1, L)))
    near = ((rows - key)[:, None] - inner[None, :]).to(gl.float32)
    distance = gl.abs(near[:, None, :] - octet.to(gl.float32)[None, :, None])
    t = t * scale - spot.slope * distance
    return gl.convert_layout(t.reshape([PART, COLUMNS]), s.type.layout)


@gluon.jit
def add_to_dbias(inputs, numbers, form: gl.constexpr, ds, spot, key, lo, hi, MASKED: gl.constexpr):
    """ds (rows, keys) of a block: of pairs that are seen, and rows that are the tile's own.

    A block that several row sets see comes once for each, with other pairs every time. So where the
    bias is not broadcast, each number is added once, to zero, and the order of atomics is nothing.
    Bounds are looked at with each number, as in `hopper_bwd.seen`: predicates would need registers.
    """
    COLUMNS: gl.constexpr = form.BN
    t = ds.reshape([PART, COLUMNS // 8, 8])
    L: gl.constexpr = t.type.layout
    row_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, L))
    octet = 8 * gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    inner = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :]
    if MASKED:
        low = lo - key
        high = hi - key
    else:
        low = gl.zeros_like(spot.rows)
        high = gl.where(spot.rows < spot.row_end, COLUMNS, 0)
    low = gl.convert_layout(low, row_l)[:, None] - inner
    high = gl.convert_layout(high, row_l)[:, None] - inner
    rows = gl.convert_layout(spot.rows, row_l).to(gl.int64)
    line = spot.head.to(gl.int64) * numbers.stride_dbh + key
    line += rows * (numbers.stride_dbi + hidden_zero())
    place = (inputs.DBIAS + line)[:, None] + inner
    place = place[:, None, :] + octet
    gl.inline_asm_elementwise(
        """{
        .reg .pred inside;
        setp.ge.s32 inside, $3, $4;
        setp.lt.and.s32 inside, $3, $5, inside;
        @inside red.relaxed.gpu.global.add.f32 [$1], $2;
        mov.u32 $0, 0;
        }""", "=r,l,f,r,r,r", [place.to(gl.int64, bitcast=True), t, octet, low[:, None, :],
                                high[:, None, :]],
        dtype=gl.int32, is_pure=False, pack=1)


# fmt: on
