"""fp32 on its way to TMA: into shared memory without bank conflicts (Gluon, sm_90).

TMA wants rows of 128 bytes, in which the eighths of row r are xored with r % 8. A thread of an
accumulator holds pairs of columns, and half a warp stores 32 bytes of four rows at a time: two
eighths, which the swizzle sends to the same banks for rows 2n and 2n + 1. So every second row
stores columns of the other half of its 128 bytes first. No number moves between threads: a select
for each, and stores take half as long.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from keel._versions import reinterpreted
from keel.kernels.hopper_common import PART

# fmt: off

TURNED = gl.constexpr(gl.SharedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4 + 16], [2, 8], [4, 16], [8, 0], [16, 0],
     [32, 0], [0, 32]]))
"""64 rows of 64 columns as TMA has them, but for columns 0..15 and 16..31 of 32, which odd rows
have the other way round."""


@gluon.jit
def store_turned(place, x):
    """x (64, 64), fp32 and an accumulator, into `place`, (64, 1, 64) with the swizzle of TMA."""
    low, high = gl.split(x.reshape([PART, PART // 32, 2, 16]).permute((0, 1, 3, 2)))
    rows = gl.arange(0, PART, gl.SliceLayout(1, gl.SliceLayout(2, low.type.layout)))
    odd = ((rows & 1) == 1)[:, None, None]
    turned = gl.join(gl.where(odd, high, low), gl.where(odd, low, high)).permute((0, 1, 3, 2))
    turned = gl.convert_layout(turned.reshape([PART, PART]), x.type.layout)
    reinterpreted(place, gl.float32, [PART, PART], TURNED).store(turned)


# fmt: on
