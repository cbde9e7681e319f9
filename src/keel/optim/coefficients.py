"""Coefficients of the odd polynomials a·x + b·x³ + c·x⁵ that push singular values towards 1.

Each step of Newton-Schulz applies one of them. A set has its own triple for every step, or one
for all. All of them expect singular values in [0, 1], which dividing by the Frobenius norm gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]
"""A name from NAMES, one triple for all steps, or a triple for each."""

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
"""torch.optim.Muon's: steepest at 0; large values end between 0.68 and 1.13, not at 1."""

_TUNED: tuple[Triple, ...] = (  # Y. Jiacheng's: one triple per step, for five steps
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

_CANS: tuple[Triple, ...] = (  # Chebyshev-type, arXiv 2506.10935
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)

_POLAR_EXPRESS: tuple[Triple, ...] = (  # minimax for [0.001, 1], arXiv 2505.16932
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_CONVERGED: Triple = (1.875, -1.25, 0.375)
_FINISH: Triple = (2.0, -1.5, 0.5)

SAFETY = 1.02
"""Rounding may lift a singular value above 1, where Polar Express and CANS throw it far off. Their
polynomials are therefore stretched: p(x / SAFETY)."""


def _stretched(triple: Triple) -> Triple:
    a, b, c = triple
    return a / SAFETY, b / SAFETY**3, c / SAFETY**5


def _quintic(steps: int) -> tuple[Triple, ...]:
    return (QUINTIC,) * steps


def _quintic_tuned(steps: int) -> tuple[Triple, ...]:
    return (_TUNED + _TUNED[-1:] * steps)[:steps]


def _cans(steps: int) -> tuple[Triple, ...]:
    stretched = tuple(_stretched(t) for t in _CANS)
    return (stretched + (_CONVERGED,) * steps)[:steps]


def _polar_express(steps: int) -> tuple[Triple, ...]:
    stretched = tuple(_stretched(t) for t in _POLAR_EXPRESS)
    return (stretched + (_CONVERGED,) * steps)[:steps]


def _quintic_finished(steps: int) -> tuple[Triple, ...]:
    """DeepSeek-V4's: two last steps that converge to 1, behind those that grow."""
    finish = min(2, steps)
    return (QUINTIC,) * (steps - finish) + (_FINISH,) * finish


_SETS = {
    "quintic": _quintic,
    "quintic_tuned": _quintic_tuned,
    "quintic_finished": _quintic_finished,
    "polar_express": _polar_express,
    "cans": _cans,
}
NAMES = tuple(_SETS)


def resolve_coefficients(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """One triple for every step.

    >>> resolve_coefficients("quintic", 2)
    ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))
    >>> resolve_coefficients([(3, -3.2, 1.2), (1.875, -1.25, 0.375)], 2)
    ((3.0, -3.2, 1.2), (1.875, -1.25, 0.375))
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps must be a whole number from 0 to 99, got {steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in _SETS:
            raise ValueError(
                f"ns_coefficients {coefficients!r} is not known; the sets are {', '.join(NAMES)}"
            )
        return _SETS[coefficients](steps)
    given = tuple(coefficients)
    if is_one_triple(given):
        return (_triple(given),) * steps  # type: ignore[arg-type]
    triples = tuple(_triple(t) for t in given)  # type: ignore[arg-type]
    if len(triples) != steps:
        raise ValueError(
            f"ns_coefficients has triples for {len(triples)} steps, but ns_steps is {steps}; "
            f"pass ns_steps={len(triples)}, or one triple (a, b, c) for all steps"
        )
    return triples


def is_one_triple(coefficients: object) -> bool:
    """Whether these are (a, b, c) for all steps, which is how torch.optim.Muon takes them."""
    return (
        isinstance(coefficients, Sequence)
        and not isinstance(coefficients, str)
        and len(coefficients) > 0
        and all(isinstance(x, int | float) for x in coefficients)
    )


def _triple(values: Sequence[float]) -> Triple:
    try:
        a, b, c = (float(x) for x in values)
    except (TypeError, ValueError):
        raise ValueError(
            f"ns_coefficients must be triples (a, b, c) of numbers, got {values!r}"
        ) from None
    if not all(map(math.isfinite, (a, b, c))):
        raise ValueError(f"ns_coefficients must be finite, got {values!r}")
    return a, b, c
