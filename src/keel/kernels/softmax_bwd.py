"""Fused softmax, backward: from the probabilities, never in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import tanh
from keel.kernels.launch import Prepared, Tensors, launch
from keel.kernels.softmax_common import (
    RowConfig,
    again,
    clamped,
    class_parts,
    class_width,
    fill,
    is_banded,
    row_strides,
    rows_of_program,
    shape_constants,
    span,
    sum_of_parts,
    unit_of,
    width_for,
    within,
)

INTEGERS = [
    *("heads", "sq", "sk", "lo", "hi"),
    *(f"stride_{name}{dim}" for name in "xd" for dim in "bhi"),
]

# fmt: off


@triton.jit
def _input_gradient(
    X, DX, dy, y, dot, cols, inside, written, scale, softcap, HAS_SOFTCAP: tl.constexpr,
):
    """Writes scale * y * (dy - dot), bent by the softcap."""
    dy, y = dy.to(tl.float32), y.to(tl.float32)
    dx = y * (dy - dot[:, None]) * scale
    if HAS_SOFTCAP:
        x = tl.load(X + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        bent = tanh(x.to(tl.float32) * (scale / softcap))
        dx = dx * (1.0 - bent * bent)
    dx = tl.where(y == 0.0, 0.0, dx)  # where y is 0, dy may be anything, infinite too
    tl.store(DX + cols[None, :], dx.to(DX.dtype.element_ty), mask=written, cache_modifier=".cs")


@triton.jit
def _product(dy, y):
    dy, y = dy.to(tl.float32), y.to(tl.float32)
    return tl.where(y == 0.0, 0.0, dy * y)


@triton.jit
def _backward_in_registers(
    X, DY, Y, DX, there, alive, begin, ends, sk, scale, softcap, zero,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, BANDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr,
):
    first_cols = begin + tl.arange(0, WIDTH)
    ys, dys = (), ()
    for part in tl.static_range(PARTS):
        cols = first_cols + part * WIDTH
        inside = within(alive, cols, ends, EXACT)
        y = tl.load(Y + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        dy = tl.load(DY + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        ys, dys = ys + (y,), dys + (dy,)
    if BANDED:  # zeros go out while y and dy come in
        fill(DX, zero, 0, begin, there)
        fill(DX, zero, begin + WIDTH * PARTS, sk, there)
    products = ()
    for part in tl.static_range(PARTS):
        products = products + (_product(dys[part], ys[part]),)
    dot = sum_of_parts(products, PARTS)
    for part in tl.static_range(PARTS):
        cols = first_cols + part * WIDTH
        y, dy = ys[part], dys[part]
        if PACKED:
            y, dy = again(y, PTX), again(dy, PTX)
        inside = within(alive, cols, ends, EXACT)
        written = within(there, cols, tl.zeros_like(ends) + sk, EXACT)
        _input_gradient(X, DX, dy, y, dot, cols, inside, written, scale, softcap, HAS_SOFTCAP)
    return dot


@triton.jit
def _backward_twice(
    X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
    WIDTH: tl.constexpr, BANDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):
    ROWS: tl.constexpr = there.shape[0]
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    ends = tl.zeros([ROWS], tl.int32) + end
    steps = (end - begin + WIDTH - 1) // WIDTH
    for step in range(steps):
        cols = begin + step * WIDTH + tl.arange(0, WIDTH)
        inside = within(alive, cols, ends, EXACT)
        y = tl.load(Y + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_last")
        dy = tl.load(DY + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_last")
        sums += _product(dy, y)
    dot = tl.sum(sums, 1)
    for step in range(steps):  # backwards, as in the forward
        cols = begin + (steps - 1 - step) * WIDTH + tl.arange(0, WIDTH)
        inside = within(alive, cols, ends, EXACT)
        y = tl.load(Y + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        dy = tl.load(DY + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        written = within(there, cols, ends, EXACT)
        _input_gradient(X, DX, dy, y, dot, cols, inside, written, scale, softcap, HAS_SOFTCAP)
    if BANDED:
        fill(DX, zero, 0, begin, there)
        fill(DX, zero, end, sk, there)
    return dot


@triton.jit(do_not_specialize=INTEGERS)
def softmax_bwd_kernel(
    X, DY, Y, DX, LSE, DOT,
    heads, sq, sk, lo, hi, scale, softcap,
    stride_xb, stride_xh, stride_xi, stride_db, stride_dh, stride_di,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CLASSES: tl.constexpr,
    ONE_PASS: tl.constexpr, PACKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_LSE: tl.constexpr, WANT_DOT: tl.constexpr,
    ENDS_MEET: tl.constexpr, EXACT: tl.constexpr, STEP: tl.constexpr, PTX: tl.constexpr,
):
    batch, head, first, i, there = rows_of_program(
        tl.program_id(0), heads, sq, ROWS, 0, ENDS_MEET)
    sk *= STEP
    begin, end, ends = span(first, i, sq, sk, lo, hi, ROWS, HAS_LO, HAS_HI, STEP)
    batch = batch.to(tl.int64)
    matrix = batch * heads + head
    alive = there
    if HAS_LSE:  # rows that saw nothing: whatever their output, no input made it
        alive = there & (tl.load(LSE + matrix * sq + i, mask=there, other=0.0) != float("-inf"))
    row = i.to(tl.int64)[:, None]
    if HAS_SOFTCAP:
        X += (batch * stride_xb + head.to(tl.int64) * stride_xh + row * stride_xi) * STEP
    DY += (batch * stride_db + head.to(tl.int64) * stride_dh + row * stride_di) * STEP
    Y += (matrix * sq + row) * sk
    DX += (matrix * sq + row) * sk
    zero = tl.zeros([ROWS], tl.float32)
    if ONE_PASS:
        need = end - begin
        if CLASSES >= 4 and need <= class_width(WIDTH, PARTS, 3) * class_parts(PARTS, 3):
            dot = _backward_in_registers(
                X, DY, Y, DX, there, alive, begin, ends, sk, scale, softcap, zero,
                class_width(WIDTH, PARTS, 3), class_parts(PARTS, 3), PACKED,
                HAS_LO or HAS_HI, HAS_SOFTCAP, EXACT, PTX)
        elif CLASSES >= 3 and need <= class_width(WIDTH, PARTS, 2) * class_parts(PARTS, 2):
            dot = _backward_in_registers(
                X, DY, Y, DX, there, alive, begin, ends, sk, scale, softcap, zero,
                class_width(WIDTH, PARTS, 2), class_parts(PARTS, 2), PACKED,
                HAS_LO or HAS_HI, HAS_SOFTCAP, EXACT, PTX)
        elif CLASSES >= 2 and need <= class_width(WIDTH, PARTS, 1) * class_parts(PARTS, 1):
            dot = _backward_in_registers(
                X, DY, Y, DX, there, alive, begin, ends, sk, scale, softcap, zero,
                class_width(WIDTH, PARTS, 1), class_parts(PARTS, 1), PACKED,
                HAS_LO or HAS_HI, HAS_SOFTCAP, EXACT, PTX)
        else:
            dot = _backward_in_registers(
                X, DY, Y, DX, there, alive, begin, ends, sk, scale, softcap, zero,
                WIDTH, PARTS, PACKED, HAS_LO or HAS_HI, HAS_SOFTCAP, EXACT, PTX)
    else:
        dot = _backward_twice(X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
                              WIDTH, HAS_LO or HAS_HI, HAS_SOFTCAP, EXACT)
    if WANT_DOT:
        tl.store(DOT + matrix * sq + i, dot, mask=there)


# fmt: on


def choose_config(sk: int, banded: bool, unit: int) -> RowConfig:
    """The fastest measured on sm_90 with 16-bit scores; see benchmarks/LOG.md."""
    width = width_for(sk)
    if width == 65536:
        return RowConfig(1, 8192, 32, False)
    if width > 16384:
        return RowConfig(1, 8192, 16, False, max_registers=64)
    if width > 8192:
        return RowConfig(1, 4096, 16, False, max_registers=32)
    if width > 4096:
        if sk == width and not banded and unit > 1:
            return RowConfig(1, width, 8, True)
        return RowConfig(1, 2048, 8, False)
    if width > 1024:
        warps = 4 if width == 4096 and not banded and sk < width else 2
        return RowConfig(1, width, warps, True, packed=banded or width == 4096)
    if not banded or width == 256:
        return RowConfig(1024 // width, width, 1 if unit > 1 else 2, True)
    if width == 1024:
        return RowConfig(1, width, 2, True, packed=True)
    return RowConfig(2048 // width, width, 1 if width == 512 else 2, True)


def backward(
    dy: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    band: tuple[int, int],
    dx: torch.Tensor,
    lse: torch.Tensor | None = None,
    dot: torch.Tensor | None = None,
    config: RowConfig | None = None,
) -> None:
    """Fills dx (b, h, sq, sk), and dot (b, h, sq) fp32 = rowsum(dy * y).

    x is needed with a softcap, lse (b, h, sq) where rows that saw nothing may not be zeros.
    """

    def prepare() -> Prepared | None:
        b, h, sq, sk = y.shape
        if y.numel() == 0:
            return None
        inner = clamped(band, sq, sk)
        banded = is_banded(inner, sq, sk)
        unit = unit_of(sk, dy, x)
        chosen = config or choose_config(sk, banded, unit)
        fits = sk % (chosen.width * chosen.parts) == 0 and sq % chosen.rows == 0
        exact = fits and lse is None and not banded
        return Prepared(
            (b * h * -(-sq // chosen.rows),),
            {
                **{"heads": h, "sq": sq, "sk": sk // unit, "lo": inner[0], "hi": inner[1]},
                **{"scale": scale, "softcap": softcap},
                **({} if x is None else row_strides("x", x, unit)),
                **row_strides("d", dy, unit),
                **shape_constants(chosen, inner, sq, sk, unit),
                "EXACT": exact and chosen.one_pass,  # two passes are slower with it
                **{"HAS_SOFTCAP": softcap > 0, "HAS_LSE": lse is not None},
                "WANT_DOT": dot is not None,
            },
            num_warps=chosen.num_warps,
            max_registers=chosen.max_registers,
        )

    tensors: Tensors = {"X": x, "DY": dy, "Y": y, "DX": dx, "LSE": lse, "DOT": dot}
    launch(softmax_bwd_kernel, (scale, softcap, band, config), tensors, prepare)
