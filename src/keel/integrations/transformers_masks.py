"""From the mask functions of transformers to masks made of slices.

transformers describes a mask as a function of (sample, head, query, key) that is put together from
a few known ones by `and_masks` and `or_masks`. They are known here by their code, and what they
mean is read from their closures; nothing is evaluated over pairs. Other functions are refused.

b samples of sq queries and sk keys; positions count from the beginning of a sample, what a cache
holds included. Masks are over the tokens of all samples behind each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import masking_utils as hf

from keel.masks import AttnMask
from keel.masks.arrays import Ints, ragged_range
from keel.masks.intervals import UNBOUNDED

HIDDEN = -1
OWN_ARITHMETIC = (
    "this model computes with its attention mask instead of leaving it to the attention function, "
    "so attn_implementation='keel' cannot serve it: take another one"
)

Span = tuple[int, int]
"""The first position, and how many."""
Segments = Callable[[int, int], Ints]
"""(first, count) -> (b or 1, count): which segment each position belongs to; below 0: to none."""


@dataclass(frozen=True, slots=True)
class Term:
    """Pairs with lo <= key - query <= hi that are of one segment wherever there are segments."""

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    segments: tuple[Segments, ...] = ()

    def __and__(self, other: Term) -> Term:
        lo, hi = max(self.lo, other.lo), min(self.hi, other.hi)
        return Term(lo, hi, self.segments + other.segments)


def terms_of(function: Callable[..., Any]) -> list[Term]:
    """What a mask function of transformers means: the union of terms."""
    if function is hf.causal_mask_function:
        return [Term(hi=0)]
    if function is hf.bidirectional_mask_function:
        return [Term()]
    read = readers().get(getattr(function, "__code__", None))
    if read is None:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"the mask function {name} is not known to attn_implementation='keel', which reads the "
            "causal, windowed, chunked, packed and blockwise masks of transformers: take another "
            "attn_implementation for this model"
        )
    cells = function.__closure__ or ()
    return read(*(cell.cell_contents for cell in cells))


def _both(functions: tuple[Callable[..., Any], ...]) -> list[Term]:
    pairs = itertools.product(*(terms_of(function) for function in functions))
    return [functools.reduce(lambda one, two: one & two, choice, Term()) for choice in pairs]


def _either(functions: tuple[Callable[..., Any], ...]) -> list[Term]:
    return [term for function in functions for term in terms_of(function)]


def _window(size: int) -> list[Term]:
    return [Term(lo=1 - int(size))]


def _window_both_ways(size: int) -> list[Term]:
    return [Term(lo=-int(size), hi=int(size))]


def _segments(numbers: torch.Tensor) -> list[Term]:
    return [Term(segments=(listed(_read(numbers)),))]


def _chunks(size: int, left_padding: torch.Tensor) -> list[Term]:
    """Chunks are counted from the end of a sample's left padding."""
    start = _read(left_padding)[:, None]
    shift = start.max(initial=0) // size + 1  # positions in the padding are in chunks, too

    def numbers(first: int, count: int) -> Ints:
        chunk: Ints = (np.arange(first, first + count) - start) // size + shift
        return chunk

    return [Term(segments=(numbers,))]


def listed(numbers: Ints) -> Segments:
    """Segments by the (b or 1, positions) numbers of all positions."""

    def segments(first: int, count: int) -> Ints:
        if numbers.shape[1] < first + count:
            raise ValueError(
                f"the mask speaks of {numbers.shape[1]} positions, but there are {first + count}"
            )
        return numbers[:, first : first + count]

    return segments


@functools.cache
def readers() -> dict[Any, Callable[..., list[Term]]]:
    """By the code of a function that the factory returned: what reads its closure.

    Closures hold their variables in alphabetical order, as the arguments of the readers stand.
    """
    some = torch.zeros(1, 1, dtype=torch.int64)
    made: dict[str, tuple[tuple[Any, ...], tuple[str, ...], Callable[..., list[Term]]]] = {
        "and_masks": ((hf.causal_mask_function,), ("mask_functions",), _both),
        "or_masks": ((hf.causal_mask_function,), ("mask_functions",), _either),
        "sliding_window_overlay": ((1,), ("sliding_window",), _window),
        "sliding_window_bidirectional_overlay": ((1,), ("sliding_window",), _window_both_ways),
        "chunked_overlay": ((1, some[0]), ("chunk_size", "left_padding"), _chunks),
        "packed_sequence_mask_function": ((some,), ("packed_sequence_mask",), _segments),
        "blockwise_overlay": ((some,), ("block_sequence_ids",), _segments),
    }
    found = {}
    for name, (arguments, variables, read) in made.items():
        factory = getattr(hf, name, None)
        code = None if factory is None else factory(*arguments).__code__
        if code is None or code.co_freevars != variables:
            raise ImportError(
                f"transformers {transformers.__version__} has no {name} over "
                f"{', '.join(variables)}: attn_implementation='keel' needs 5.10 or newer, and may "
                "not know the newest yet"
            )
        found[code] = read
    return found


class ModelMask:
    """What the layers of one kind attend to in one forward; goes where transformers has a mask.

    `attended` is the mask; `within` narrows it to packed documents, once for each forward.
    """

    def __init__(
        self,
        terms: list[Term],
        batch: int,
        queries: Span,
        keys: Span,
        padding: Ints | None = None,
    ) -> None:
        self.terms, self.batch, self.queries, self.keys = terms, batch, queries, keys
        self.padding = padding
        """(b, positions): 0, or HIDDEN; None: no padding."""
        self._narrowed: dict[tuple[int, ...], tuple[Any, AttnMask]] = {}
        if padding is None and not self.is_packed:
            bands = tuple((term.lo, term.hi) for term in terms)
            self.attended = _bands(bands, batch, queries, keys)
        else:
            self.attended = _build(terms, batch, queries, keys, padding)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, 1, sq, sk), as the 4-D tensor would have it that is never made."""
        return self.batch, 1, self.queries[1], self.keys[1]

    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> ModelMask:
        """Itself: generation asks for it."""
        return self

    @property
    def is_square(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return self.queries == self.keys

    @property
    def padded_keys(self) -> Ints | None:
        """(b, sk): 0, or HIDDEN; None: no padding."""
        return None if self.padding is None else listed(self.padding)(*self.keys)

    @property
    def is_packed(self) -> bool:
        """Whether segments are a part of the mask."""
        return any(term.segments for term in self.terms)

    def has_window(self, size: int) -> bool:
        """Whether all that is seen by distance alone is seen through this window."""
        banded = [term for term in self.terms if term.hi < UNBOUNDED]
        return bool(banded) and all(x.lo == (1 - size if x.hi == 0 else -size) for x in banded)

    def within(
        self, tensors: tuple[torch.Tensor, ...], read: Callable[..., Ints | None]
    ) -> AttnMask:
        """The pairs that are of one segment by read(*tensors), too; None: all are.

        Remembered for the tensors, since each layer asks again.
        """
        key = tuple(map(id, tensors))
        if key not in self._narrowed:
            segments = read(*tensors)
            if segments is None:
                mask = self.attended
            else:
                terms = [term & Term(segments=(listed(segments),)) for term in self.terms]
                mask = _build(terms, self.batch, self.queries, self.keys, self.padding)
            self._narrowed[key] = tensors, mask  # the tensors too, or their ids might come again
        return self._narrowed[key][1]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{OWN_ARITHMETIC} (it asks for attention_mask.{name})")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(f"{OWN_ARITHMETIC} (it calls {getattr(func, '__name__', func)})")


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] = hf.causal_mask_function,
    attention_mask: torch.Tensor | ModelMask | None = None,
    **unused: Any,
) -> ModelMask:
    """The mask interface of transformers, called once for each kind of layer in a forward.

    `unused` says how other implementations may shorten or lay out their tensors.
    """
    if isinstance(attention_mask, ModelMask):  # generation makes masks ahead of the model
        return attention_mask
    padding = None
    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size:
            raise ValueError(
                f"attention_mask must be ({batch_size}, tokens), 1 for tokens and 0 for padding, "
                f"got {tuple(attention_mask.shape)}"
            )
        real = attention_mask.detach().cpu().numpy() != 0
        missing = max(0, int(kv_offset) + kv_length - real.shape[1])
        if missing or not real.all():  # places that a cache has not filled yet are hidden
            padding = np.where(np.pad(real, ((0, 0), (0, missing))), 0, HIDDEN).astype(np.int64)
    spans = (int(q_offset), q_length), (int(kv_offset), kv_length)
    return ModelMask(terms_of(mask_function), batch_size, *spans, padding)


def documents_of_bounds(batch: int, cu_seqlens: torch.Tensor, total: int) -> Ints:
    """(b, total / b) numbers of documents that are bounded in the tokens of all samples."""
    bounds = _read(cu_seqlens)
    drops = bounds.ndim != 1 or len(bounds) == 0 or (np.diff(bounds) < 0).any()
    if drops or bounds[0] != 0 or bounds[-1] > total:
        raise ValueError(
            f"cu_seq_lens must rise from 0 to at most the {total} tokens of the batch, got "
            f"{bounds.tolist()}"
        )
    numbers = np.searchsorted(bounds, np.arange(total), side="right") - 1
    return np.where(numbers < len(bounds) - 1, numbers, HIDDEN).reshape(batch, -1)


def documents_of_positions(position_ids: torch.Tensor, padding: Ints | None) -> Ints | None:
    """(b or 1, tokens) numbers of documents: one begins where positions do not go on by 1.

    Positions of padding mean nothing, so neither do steps into it and out of it.
    """
    steps = np.diff(_read(position_ids), axis=-1) != 1
    if padding is not None:
        steps = steps & (padding[:, 1:] >= 0) & (padding[:, :-1] >= 0)
    if not steps.any():
        return None
    return np.pad(np.cumsum(steps, -1), ((0, 0), (1, 0)))


@functools.lru_cache(maxsize=64)
def _bands(bands: tuple[tuple[int, int], ...], batch: int, queries: Span, keys: Span) -> AttnMask:
    return _build([Term(*band) for band in bands], batch, queries, keys, None)


def _build(
    terms: list[Term], batch: int, queries: Span, keys: Span, padding: Ints | None
) -> AttnMask:
    """Slices of the runs of queries and of keys that belong to one segment.

    In causal attention queries are tokens as keys are, so those in the padding see nothing: they
    would only add to the work and to max logits. Elsewhere padding may be that of other tokens.
    """
    causal = any(term.hi <= 0 for term in terms)
    first = min(queries[0], keys[0])
    count = max(sum(queries), sum(keys)) - first
    slices = []
    for term in terms:
        numbers = _numbers(term.segments, batch, first, count)
        seen = numbers
        if padding is not None:
            seen = np.where(listed(padding)(first, count) >= 0, numbers, HIDDEN)
        k_runs = _runs(seen, keys[0] - first, keys[1])
        q_runs = _runs(seen if causal else numbers, queries[0] - first, queries[1])
        slices.append(_joined(term, q_runs, k_runs, queries, keys))
    return AttnMask(np.concatenate(slices), batch * queries[1], batch * keys[1])


def _numbers(segments: tuple[Segments, ...], batch: int, first: int, count: int) -> Ints:
    """(b, count): one number for all that share their segments, another one in each sample."""
    numbers = np.zeros((batch, count), np.int64)
    seen = np.ones((batch, count), bool)
    for more in segments:
        here = more(first, count)
        numbers = numbers * (here.max(initial=0) + 1) + here
        seen &= here >= 0
    numbers += np.arange(batch)[:, None] * (numbers.max(initial=0) + 1)
    return np.where(seen, numbers, HIDDEN)


def _runs(numbers: Ints, begin: int, length: int) -> tuple[Ints, Ints, Ints]:
    """(number, start, end) of each run of these tokens, those of all samples counted through."""
    flat = numbers[:, begin : begin + length].ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    bounds = np.concatenate([[0], edges, [len(flat)]]) if len(flat) else np.zeros(1, np.int64)
    start, end = bounds[:-1], bounds[1:]
    keep = flat[start] != HIDDEN
    return flat[start[keep]], start[keep], end[keep]


def _joined(
    term: Term,
    q_runs: tuple[Ints, Ints, Ints],
    k_runs: tuple[Ints, Ints, Ints],
    queries: Span,
    keys: Span,
) -> Ints:
    """(n, 6) slices of all pairs of runs with one number."""
    (q_number, q0, q1), (k_number, k0, k1) = q_runs, k_runs
    order = np.argsort(k_number, kind="stable")
    sorted_number = k_number[order]
    begin = np.searchsorted(sorted_number, q_number, side="left")
    matches = np.searchsorted(sorted_number, q_number, side="right") - begin
    one = np.repeat(np.arange(len(q_number)), matches)
    two = order[ragged_range(begin, matches)]
    q0, q1, k0, k1 = q0[one], q1[one], k0[two], k1[two]
    # From distances between positions to distances between places in the flattened tensors.
    sample = q0 // max(queries[1], 1)
    shift = sample * (keys[1] - queries[1]) + queries[0] - keys[0]
    lo = np.where(term.lo <= -UNBOUNDED, -UNBOUNDED, term.lo + shift)
    hi = np.where(term.hi >= UNBOUNDED, UNBOUNDED, term.hi + shift)
    slices = np.stack([q0, q1, k0, k1, lo, hi], 1)
    return slices[(k0 - (q1 - 1) <= hi) & (k1 - 1 - q0 >= lo)]


def _read(tensor: torch.Tensor) -> Ints:
    return tensor.detach().cpu().numpy().astype(np.int64)
