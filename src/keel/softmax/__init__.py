"""Fused scale + mask + softmax: any shape, any mask, nothing of the size of the scores between."""

from keel.softmax.functional import Explanation, explain, scaled_masked_softmax
from keel.softmax.modules import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
    UsageError,
)

__all__ = [
    "AttnMaskType",
    "Explanation",
    "FusedScaleMaskSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "SoftmaxOne",
    "UsageError",
    "explain",
    "scaled_masked_softmax",
]
