"""Hypothesis strategies that several test files share."""

from __future__ import annotations

from hypothesis import strategies as st

from keel.masks import AttnMask, AttnMaskType, AttnSlice


@st.composite
def spans(draw: st.DrawFn, limit: int) -> tuple[int, int]:
    """A range within [0, limit]: often the whole axis, sometimes empty."""
    if draw(st.integers(0, 3)) == 0:
        return 0, limit
    start = draw(st.integers(0, limit))
    return start, draw(st.integers(start, limit))


@st.composite
def attn_slices(draw: st.DrawFn, tq: int, tk: int) -> AttnSlice:
    """One slice inside tq x tk: one of the four types, or an arbitrary band."""
    q, k = draw(spans(tq)), draw(spans(tk))
    if draw(st.booleans()):
        return AttnSlice.of_type(q, k, draw(st.sampled_from(AttnMaskType)))
    limit = st.none() | st.integers(-tq - 2, tk + 2)
    return AttnSlice(*q, *k, lo=draw(limit), hi=draw(limit))


@st.composite
def attn_masks(draw: st.DrawFn, max_tokens: int = 64, max_slices: int = 8) -> AttnMask:
    """A union of up to max_slices slices that may overlap, touch or be empty."""
    tq, tk = draw(st.integers(1, max_tokens)), draw(st.integers(1, max_tokens))
    slices = draw(st.lists(attn_slices(tq, tk), max_size=max_slices))
    return AttnMask(slices, tq, tk)
