"""What attends to what: ranges, slices and masks, with builders for the usual ones."""

from keel.masks.builders import (
    block_causal,
    causal,
    documents,
    from_block_mask,
    from_dense,
    full,
    prefix_lm,
    sliding_window,
)
from keel.masks.intervals import RowIntervals
from keel.masks.mask import AttnMask
from keel.masks.ranges import AttnRange, AttnRanges
from keel.masks.slices import AttnMaskType, AttnSlice

__all__ = [
    "AttnMask",
    "AttnMaskType",
    "AttnRange",
    "AttnRanges",
    "AttnSlice",
    "RowIntervals",
    "block_causal",
    "causal",
    "documents",
    "from_block_mask",
    "from_dense",
    "full",
    "prefix_lm",
    "sliding_window",
]
