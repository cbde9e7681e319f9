"""Newton-Schulz: U·Vᵀ of a matrix U·S·Vᵀ, nearly, by matrix products alone.

Shapes: x (..., m, n), any number of matrices at once; inside m <= n, the other way round they are
transposed. Two forms of the same polynomial:

    plain   G = X·Xᵀ,  X <- a·X + (b·G + c·G²)·X, step after step
    gram    the steps act on the small G (m, m) and are gathered in Q; X <- Q·X once

The gram form wins where n is well above m, since only its first and last products touch n. It sees
squares of singular values, so small ones sink below the rounding of G: even below zero, from where
steps drive them off. So X and G are formed anew after two steps, when small values have grown, and
after every third step from there. On CUDA both forms compute half of every large symmetric product.
"""

from __future__ import annotations

import itertools
import math

import torch

from keel.optim.coefficients import (
    QUINTIC,
    Coefficients,
    Triple,
    is_one_triple,
    resolve_coefficients,
)

FORMS = ("auto", "plain", "gram")
NORMALIZE = ("fp32", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

GRAM_FROM_ASPECT = 1.5
"""n / m from which "auto" takes the gram form on CUDA, if its products are worth halving."""

HALVES_FROM = 25_000_000_000
"""Multiplications of a product from which half of it is faster than all of it by cuBLAS: below,
launching a kernel of ours takes longer than the GPU needs for the whole product."""

FIRST_BLOCK, LATER_BLOCKS = 2, 3


def orthogonalize(
    x: torch.Tensor,
    *,
    coefficients: Coefficients = QUINTIC,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    form: str = "auto",
    normalize: str | None = None,
) -> torch.Tensor:
    """(..., m, n) to (..., m, n) in `dtype`: singular vectors stay, singular values go near 1.

    Args:
        coefficients: a name from `coefficients.NAMES`, (a, b, c) for all steps, or one for each.
        eps: the least norm to divide by, so that zeros stay zeros.
        dtype: of the arithmetic and of the result; products are summed in fp32 (or fp64).
        form: "plain", "gram", or "auto": by shape on CUDA, plain elsewhere.
        normalize: "fp32" divides by the Frobenius norm in fp32 and rounds once; "torch" rounds to
            `dtype` before, between and after, bit for bit as torch.optim.Muon does. None: "torch"
            where `coefficients` is one triple, torch's own way to call it, else "fp32".

    >>> x = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> y = orthogonalize(x, coefficients="polar_express", steps=8, dtype=torch.float64)
    >>> [[round(v, 4) + 0.0 for v in row] for row in y.tolist()]
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    triples = resolve_coefficients(coefficients, steps)
    check_options(dtype, form, normalize)
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            f"orthogonalize takes floating-point matrices (..., m, n), got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )
    normalize = normalize or normalization_for(coefficients)
    m, n = x.shape[-2:]
    if x.numel() == 0:
        return torch.empty_like(x, dtype=dtype)
    rows, columns = min(m, n), max(m, n)
    batch = x.new_empty(math.prod(x.shape[:-2]), rows, columns, dtype=dtype)
    normalize_into(x.reshape(-1, m, n), batch, eps, normalize)
    result = iterate(batch, triples, form)
    return (result.mT if m > n else result).reshape(x.shape)


def check_options(dtype: torch.dtype, form: str, normalize: str | None) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"ns_dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if form not in FORMS:
        raise ValueError(f"ns_form must be one of {', '.join(FORMS)}, got {form!r}")
    if normalize is not None and normalize not in NORMALIZE:
        raise ValueError(
            f"ns_normalize must be None or one of {', '.join(NORMALIZE)}, got {normalize!r}"
        )


def normalization_for(coefficients: object) -> str:
    return "torch" if is_one_triple(coefficients) else "fp32"


def normalize_into(x: torch.Tensor, out: torch.Tensor, eps: float, normalize: str) -> None:
    """x (batch, m, n) over its Frobenius norms into out (batch, min, max), turned if need be."""
    target = out if x.shape[-2] <= x.shape[-1] else out.mT
    if normalize == "torch":
        x = x.to(out.dtype)
        norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    else:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    torch.div(x, norms.clamp_(min=eps), out=target)


def iterate(x: torch.Tensor, triples: tuple[Triple, ...], form: str = "auto") -> torch.Tensor:
    """The steps on (batch, m, n) with m <= n and norms at most 1."""
    if not triples:
        return x
    if form == "auto":
        wide = x.shape[-1] >= GRAM_FROM_ASPECT * x.shape[-2]
        form = "gram" if wide and len(triples) > 2 and _halves(x) else "plain"
    return _gram_form(x, triples) if form == "gram" else _plain_form(x, triples)


def _plain_form(x: torch.Tensor, triples: tuple[Triple, ...]) -> torch.Tensor:
    for a, b, c in triples:
        gram = gram_of(x)
        polynomial = symmetric(gram, gram, gram, alpha=c, beta=b)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _gram_form(x: torch.Tensor, triples: tuple[Triple, ...]) -> torch.Tensor:
    """Blocks of steps on G; each ends with one product that touches all of X.

    bf16 works in fp16 here, with its three more bits. X is scaled by a power of two s near √m,
    since the mean eigenvalue of G is 1 / m at first, and most of its numbers are far below that.
    """
    dtype, s = x.dtype, 1.0
    if dtype in (torch.bfloat16, torch.float16):
        s = 2.0 ** (min(12, math.ceil(math.log2(x.shape[-2]))) // 2)
        x = (x * s).to(torch.float16)
    cuts = [0, *range(FIRST_BLOCK, len(triples), LATER_BLOCKS), len(triples)]
    for begin, end in itertools.pairwise(cuts):
        gram, scale, gathered = gram_of(x), s * s, None  # gram is scale · G
        for step, (a, b, c) in enumerate(triples[begin:end], begin + 1):
            factor = symmetric(gram, gram, gram, alpha=c / scale**2, beta=b / scale, diagonal=a)
            gathered = factor if gathered is None else symmetric(gathered, factor)
            if step < end:
                half = symmetric(gram, factor, alpha=1 / scale)
                gram, scale = symmetric(half, factor), 1.0
        assert gathered is not None
        x = torch.bmm(gathered, x)
    return x if x.dtype == dtype and s == 1.0 else (x / s).to(dtype)


def gram_of(x: torch.Tensor) -> torch.Tensor:
    """X·Xᵀ of (batch, m, n)."""
    if _halves(x):
        from keel.kernels.gram import symmetric_product

        return symmetric_product(x, x)
    return torch.bmm(x, x.mT)


def symmetric(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> torch.Tensor:
    """alpha · A·B + beta · C + diagonal · I of symmetric (batch, m, m) whose product is, too."""
    if _halves(a):
        from keel.kernels.gram import symmetric_product

        return symmetric_product(a, b, c, alpha=alpha, beta=beta, diagonal=diagonal)
    out = torch.baddbmm(a if c is None else c, a, b, beta=beta, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


def _halves(x: torch.Tensor) -> bool:
    """Whether half of X·Xᵀ (batch, m, m), mirrored, is sooner there than all of it."""
    enough = x.numel() * x.shape[-2] >= HALVES_FROM
    return x.is_cuda and enough and x.dtype in (torch.float16, torch.bfloat16)
