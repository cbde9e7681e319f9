"""Fused softmax, backward: from the probabilities, never in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import tanh
from keel.kernels.launch import Prepared, Tensors, launch
from keel.kernels.softmax_common import (
    UNIT,
    VECTOR,
    RowConfig,
    again,
    clamped,
    class_parts,
    class_span,
    class_width,
    edge_cols,
    edges,
    fill,
    in_blocks,
    in_step,
    is_banded,
    reach,
    row_strides,
    rows_of_program,
    shape_constants,
    span,
    sum_of_parts,
    unit_of,
    whole,
    width_for,
    within,
    written,
)

INTEGERS = [
    *("heads", "sq", "sk", "lo", "hi"),
    *(f"stride_{name}{dim}" for name in "xd" for dim in "bhi"),
]

# fmt: off


@triton.jit
def _load_both(Y, DY, cols, inside, skew, sk, SKEWED: tl.constexpr, EVICTION: tl.constexpr):
    """y and dy at cols, broadcastable to inside (ROWS, WIDTH); y is 0 outside the row."""
    y = tl.load(Y + cols, mask=inside, other=0.0, eviction_policy=EVICTION)
    dy = tl.load(DY + cols, mask=inside, other=0.0, eviction_policy=EVICTION)
    if SKEWED:
        own = (cols >= skew[:, None]) & (cols < (skew + sk)[:, None])
        y = tl.where(own, y, 0.0)
    return y, dy


@triton.jit
def _input_gradient(X, dy, y, dot, cols, inside, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """scale * y * (dy - dot), bent by the softcap."""
    dy, y = dy.to(tl.float32), y.to(tl.float32)
    dx = y * (dy - dot[:, None]) * scale
    if HAS_SOFTCAP:
        x = tl.load(X + cols, mask=inside, other=0.0, eviction_policy="evict_first")
        bent = tanh(x.to(tl.float32) * (scale / softcap))
        dx = dx * (1.0 - bent * bent)
    return tl.where(y == 0.0, 0.0, dx)  # where y is 0, dy may be anything, infinite too


@triton.jit
def _product(dy, y):
    dy, y = dy.to(tl.float32), y.to(tl.float32)
    return tl.where(y == 0.0, 0.0, dy * y)


@triton.jit
def _backward_in_registers(
    X, DY, Y, DX, there, alive, skew, begin, ends, sk, scale, softcap, zero,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, BANDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr, SKEWED: tl.constexpr, PTX: tl.constexpr,
):
    first_cols = begin + tl.arange(0, WIDTH)
    ys, dys = (), ()
    for part in tl.static_range(PARTS):
        cols = first_cols + part * WIDTH
        y, dy = _load_both(Y, DY, cols[None, :], within(alive, cols, ends, EXACT), skew, sk,
                           SKEWED, "evict_first")
        ys, dys = ys + (y,), dys + (dy,)
    if BANDED:  # zeros go out while y and dy come in
        fill(DX, zero, 0, begin, there, skew, sk, SKEWED)
        fill(DX, zero, begin + WIDTH * PARTS, reach(sk, SKEWED), there, skew, sk, SKEWED)
    products = ()
    for part in tl.static_range(PARTS):
        products = products + (_product(dys[part], ys[part]),)
    dot = sum_of_parts(products, PARTS)
    for part in tl.static_range(PARTS):
        cols = first_cols + part * WIDTH
        y, dy = ys[part], dys[part]
        if PACKED:
            y, dy = again(y, PTX), again(dy, PTX)
        dx = _input_gradient(X, dy, y, dot, cols[None, :], within(alive, cols, ends, EXACT),
                             scale, softcap, HAS_SOFTCAP)
        tl.store(DX + cols[None, :], dx.to(DX.dtype.element_ty), cache_modifier=".cs",
                 mask=written(there, cols, skew, sk, EXACT, SKEWED))
    return dot


@triton.jit
def _backward_twice(
    X, DY, Y, DX, there, alive, skew, begin, end, sk, scale, softcap, zero,
    WIDTH: tl.constexpr, BANDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
    SKEWED: tl.constexpr,
):
    ROWS: tl.constexpr = there.shape[0]
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    ends = tl.zeros([ROWS], tl.int32) + end
    if SKEWED:  # of each row, no vector that holds nothing of it
        ends = tl.minimum(ends, (skew + sk + VECTOR - 1) // VECTOR * VECTOR)
    steps = (end - begin + WIDTH - 1) // WIDTH
    for step in range(steps):
        cols = begin + step * WIDTH + tl.arange(0, WIDTH)
        y, dy = _load_both(Y, DY, cols[None, :], within(alive, cols, ends, EXACT), skew, sk,
                           SKEWED, "evict_last")
        sums += _product(dy, y)
    dot = tl.sum(sums, 1)
    for step in range(steps):  # backwards, as in the forward
        cols = begin + (steps - 1 - step) * WIDTH + tl.arange(0, WIDTH)
        inside = within(alive, cols, ends, EXACT)
        y, dy = _load_both(Y, DY, cols[None, :], inside, skew, sk, SKEWED, "evict_first")
        outside = within(there, cols, ends, EXACT)
        if SKEWED:
            outside = outside & written(there, cols, skew, sk, EXACT, SKEWED)
        dx = _input_gradient(X, dy, y, dot, cols[None, :], inside, scale, softcap, HAS_SOFTCAP)
        tl.store(DX + cols[None, :], dx.to(DX.dtype.element_ty), mask=outside,
                 cache_modifier=".cs")
    if BANDED:
        fill(DX, zero, 0, begin, there, skew, sk, SKEWED)
        fill(DX, zero, end, reach(sk, SKEWED), there, skew, sk, SKEWED)
    return dot


@triton.jit(do_not_specialize=INTEGERS)
def softmax_bwd_kernel(
    X, DY, Y, DX, LSE, DOT,
    heads, sq, sk, lo, hi, scale, softcap,
    stride_xb, stride_xh, stride_xi, stride_db, stride_dh, stride_di,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CLASSES: tl.constexpr,
    ONE_PASS: tl.constexpr, PACKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_LSE: tl.constexpr, WANT_DOT: tl.constexpr,
    ENDS_MEET: tl.constexpr, EXACT: tl.constexpr, STEP: tl.constexpr, SKEWED: tl.constexpr,
    PTX: tl.constexpr,
):
    batch, head, first, i, there = rows_of_program(
        tl.program_id(0), heads, sq, ROWS, 0, ENDS_MEET)
    sk *= STEP
    batch = batch.to(tl.int64)
    matrix = batch * heads + head
    alive = there
    if HAS_LSE:  # rows that saw nothing: whatever their output, no input made it
        alive = there & (tl.load(LSE + matrix * sq + i, mask=there, other=0.0) != float("-inf"))
    row = i.to(tl.int64)
    start, skew = whole((matrix * sq + row) * sk, SKEWED)
    Y += start[:, None]
    DX += start[:, None]
    dy_start = (batch * stride_db + head.to(tl.int64) * stride_dh + row * stride_di) * STEP
    if SKEWED:  # rows of dy and x begin where those of y do, seen from a vector
        dy_start = dy_start // VECTOR * VECTOR
    DY += dy_start[:, None]
    if HAS_SOFTCAP:
        x_start = (batch * stride_xb + head.to(tl.int64) * stride_xh + row * stride_xi) * STEP
        if SKEWED:
            x_start = x_start // VECTOR * VECTOR
        X += x_start[:, None]
    begin, end, ends = span(first, i, skew, sq, sk, lo, hi, ROWS, HAS_LO, HAS_HI, STEP, SKEWED)
    zero = tl.zeros([ROWS], tl.float32)
    BANDED: tl.constexpr = HAS_LO or HAS_HI
    if ONE_PASS:
        need = end - begin
        dot = zero
        for c in tl.static_range(CLASSES):
            fits = need > class_span(WIDTH, PARTS, CLASSES, c + 1)
            if c > 0:
                fits = fits & (need <= class_span(WIDTH, PARTS, CLASSES, c))
            if CLASSES == 1 or fits:
                dot = _backward_in_registers(
                    X, DY, Y, DX, there, alive, skew, begin, ends, sk, scale, softcap, zero,
                    class_width(WIDTH, PARTS, c), class_parts(PARTS, CLASSES, c), PACKED, BANDED,
                    HAS_SOFTCAP, EXACT, SKEWED, PTX)
    else:
        dot = _backward_twice(
            X, DY, Y, DX, there, alive, skew, begin, end, sk, scale, softcap, zero, WIDTH, BANDED,
            HAS_SOFTCAP, EXACT, SKEWED)
    if SKEWED:  # reading these again is cheaper than writing single numbers from large blocks
        cols = edge_cols(skew, sk)
        own = edges(there, cols, skew, sk)
        y, dy = _load_both(Y, DY, cols, own & alive[:, None], skew, sk, False, "")
        dx = _input_gradient(X, dy, y, dot, cols, own, scale, softcap, HAS_SOFTCAP)
        tl.store(DX + cols, dx.to(DX.dtype.element_ty), mask=own)
    if WANT_DOT:
        tl.store(DOT + matrix * sq + i, dot, mask=there)


# fmt: on


def choose_config(sk: int, banded: bool, unit: int) -> RowConfig:
    """The fastest measured on sm_90 with 16-bit scores; see benchmarks/LOG.md."""
    width = width_for(sk)
    if width == 65536:
        return RowConfig(1, 8192, 32, False)
    if width > 65536:
        return RowConfig(1, 8192, 16, False, max_registers=64)
    if 128 < sk < width and unit > 1:
        most = {16_384: 14_336, 32_768: 28_672}.get(width, width)
        if not banded and sk <= most:
            return in_blocks(sk, packed=2048 < sk <= width * 7 // 8 <= 14_336)
        if 512 < sk <= 768:
            return RowConfig(1, 128, 1, True, parts=-(-sk // 128), packed=True)
    if width > 16384:
        return RowConfig(1, 8192, 16, False, max_registers=64)
    if width > 8192:
        return RowConfig(1, 4096, 16, False, max_registers=32)
    if width > 4096:
        if sk == width and not banded and unit > 1:
            return RowConfig(1, 1024, 4, True, parts=8, packed=True)
        return RowConfig(1, 2048, 4 if sk < 6144 else 8, False)
    if width == 4096 and not banded and unit > 1:
        return RowConfig(1, 1024, 4, True, parts=4)
    if width > 1024:
        return RowConfig(1, width, 4 if width == 4096 and not banded else 2, True, packed=banded)
    if not banded or width == 256:
        return RowConfig(1024 // width, width, 1 if unit > 1 else 2, True)
    if width == 1024:
        return RowConfig(1, width, 2, True, packed=True)
    return RowConfig(2048 // width, width, 1 if width == 512 else 2, True)


def choose_skewed(sk: int) -> RowConfig:
    """The same for rows that do not all begin with a vector."""
    widest = sk + UNIT - 1
    if widest <= 8192:
        return in_blocks(widest, 64 if sk <= 512 else 256)
    return RowConfig(1, 2048, 4, False) if sk <= 16_384 else RowConfig(1, 4096, 16, False)


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
        skewed = unit == 1 and in_step(dy, y) and (x is None or in_step(x, y))
        chosen = config or (choose_skewed(sk) if skewed else choose_config(sk, banded, unit))
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
                # Two passes are slower with EXACT.
                **{"EXACT": exact and chosen.one_pass and not skewed, "SKEWED": skewed},
                **{"HAS_SOFTCAP": softcap > 0, "HAS_LSE": lse is not None},
                "WANT_DOT": dot is not None,
            },
            num_warps=chosen.num_warps,
            max_registers=chosen.max_registers,
        )

    tensors: Tensors = {"X": x, "DY": dy, "Y": y, "DX": dx, "LSE": lse, "DOT": dot}
    launch(softmax_bwd_kernel, (scale, softcap, band, config), tensors, prepare)
