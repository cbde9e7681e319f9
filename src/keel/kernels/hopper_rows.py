"""What a row of a Hopper forward's tile is: a token, or one head of a token where heads are packed.

Query heads that share keys may share a tile: row r is token r // PACK and head r % PACK of their
group. So a tile of few tokens has no idle rows, and keys are read once for all heads of a group. A
box of TMA holds (tokens, PACK, dim) and lands row by row, as one of (rows, 1, dim) does. Work is
then drawn by key head; `head` is one of these throughout.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# fmt: off


@gluon.jit
def token_of(row, form: gl.constexpr):
    """Of a row of a tile; counted from the first of the tile."""
    if form.PACK == 1:
        return row
    else:
        return row >> form.PACK_BITS


@gluon.jit
def head_of(row, head, form: gl.constexpr):
    """The query head of a row."""
    if form.PACK == 1:
        return head
    else:
        return head * form.PACK + (row & (form.PACK - 1))


@gluon.jit
def bounds(inputs, row_set, mine, form: gl.constexpr):
    rows = row_set * form.TOKENS + token_of(mine, form)
    return gl.load(inputs.ROW_LO + rows), gl.load(inputs.ROW_HI + rows)


@gluon.jit
def raise_group(POINTER, tops, form: gl.constexpr):
    """Raises PACK floats, each to the highest of its rows; for one warp, and as
    `flash_common.raise_max`."""
    bits = (tops + 0.0).to(gl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    top = gl.max(bits.reshape([bits.shape[0] // form.PACK, form.PACK]), 0)
    bits = top ^ ((top >> 31) & 0x7FFFFFFF)
    place = POINTER + gl.arange(0, form.PACK, top.type.layout)
    signed = place.to(gl.pointer_type(gl.int32), bitcast=True)
    gl.atomic_max(signed, bits, mask=top >= 0, sem="relaxed")
    unsigned = place.to(gl.pointer_type(gl.uint32), bitcast=True)
    gl.atomic_min(unsigned, bits.to(gl.uint32, bitcast=True), mask=top < 0, sem="relaxed")


# fmt: on
