"""Keel: attention for training transformers.

The main call is `flex_flash_attn_func(q, k, v, q_ranges, k_ranges, attn_type_map)`, which returns
``(out, meta)``; masks are built with `keel.masks`.
"""

from keel import masks
from keel._version import __version__
from keel.attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flex_flash_attn_func,
    warmup,
)
from keel.masks import AttnMask, AttnMaskType, AttnRange, AttnRanges, AttnSlice
from keel.meta import AttnForwardMeta

__all__ = [
    "AttnForwardMeta",
    "AttnMask",
    "AttnMaskType",
    "AttnRange",
    "AttnRanges",
    "AttnSlice",
    "__version__",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_flash_attn_func",
    "masks",
    "warmup",
]
