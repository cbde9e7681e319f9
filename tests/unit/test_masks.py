"""Slices and masks against a dense oracle that asks every pair."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.strategies import attn_masks, attn_slices, spans

from keel.masks import AttnMask, AttnMaskType, AttnRange, AttnRanges, AttnSlice
from keel.masks.intervals import slices_of_rows

Dense = NDArray[np.bool_]


def dense_slice(s: AttnSlice, tq: int, tk: int) -> Dense:
    i, j = np.ogrid[:tq, :tk]
    inside = (i >= s.q0) & (i < s.q1) & (j >= s.k0) & (j < s.k1)
    above = True if s.lo is None else j - i >= s.lo
    below = True if s.hi is None else j - i <= s.hi
    return np.asarray(inside & above & below)


def dense_mask(mask: AttnMask) -> Dense:
    seen = np.zeros(mask.shape, bool)
    for s in mask:
        seen |= dense_slice(s, mask.tq, mask.tk)
    return seen


def dense_type(sq: int, sk: int, kind: AttnMaskType) -> Dense:
    """The meaning of the types, said by rows and without bands."""
    seen = np.zeros((sq, sk), bool)
    for i in range(sq):
        for j in range(sk):
            causal = sk - 1 - j >= sq - 1 - i  # from the bottom-right corner
            inverse = j >= i  # from the top-left corner
            seen[i, j] = {0: True, 1: causal, 2: inverse, 3: causal and inverse}[int(kind)]
    return seen


def rows(mask: AttnMask) -> list[str]:
    return ["".join("01"[int(x)] for x in row) for row in mask.to_dense().tolist()]


WORKED_EXAMPLES = [
    (2, 5, "causal", "11110 11111"),
    (2, 5, "invcausal", "11111 01111"),
    (2, 5, "bicausal", "11110 01111"),
    (5, 2, "causal", "00 00 00 10 11"),
    (5, 2, "invcausal", "11 01 00 00 00"),
    (5, 2, "bicausal", "00 00 00 00 00"),
    (3, 3, "bicausal", "100 010 001"),
    (3, 3, "causal", "100 110 111"),
    (2, 3, "full", "111 111"),
]


@pytest.mark.parametrize(("sq", "sk", "kind", "want"), WORKED_EXAMPLES)
def test_worked_examples(sq: int, sk: int, kind: str, want: str) -> None:
    mask = AttnMask.from_ranges([(0, sq)], [(0, sk)], kind, sq, sk)
    assert rows(mask) == want.split()


@given(st.data(), st.sampled_from(AttnMaskType), st.integers(0, 9), st.integers(0, 9))
def test_types_mean_the_same_anywhere(
    data: st.DataObject, kind: AttnMaskType, sq: int, sk: int
) -> None:
    q0, k0 = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    mask = AttnMask.from_ranges([(q0, q0 + sq)], [(k0, k0 + sk)], [kind], 20, 20)
    want = np.zeros((20, 20), bool)
    want[q0 : q0 + sq, k0 : k0 + sk] = dense_type(sq, sk, kind)
    np.testing.assert_array_equal(mask.to_dense().numpy(), want)
    typed = AttnSlice.of_type((q0, q0 + sq), AttnRange(k0, k0 + sk), kind.name.lower())
    np.testing.assert_array_equal(dense_slice(typed, 20, 20), want)


@given(st.data(), st.integers(1, 24), st.integers(1, 24))
def test_slice_arithmetic(data: st.DataObject, tq: int, tk: int) -> None:
    s = data.draw(attn_slices(tq, tk))
    seen = dense_slice(s, tq, tk)
    assert s.area == seen.sum()
    for i in range(-1, tq + 1):
        start, end = s.row(i)
        keys = np.flatnonzero(seen[i]).tolist() if 0 <= i < tq else []
        assert list(range(start, end)) == keys
    (a, b), (c, d) = data.draw(spans(tq)), data.draw(spans(tk))
    want = seen.copy()
    want[:a], want[b:] = False, False
    np.testing.assert_array_equal(dense_slice(s.cut_q(a, b), tq, tk), want)
    want = seen.copy()
    want[:, :c], want[:, d:] = False, False
    np.testing.assert_array_equal(dense_slice(s.cut_k(c, d), tq, tk), want)
    moved = dense_slice(s.shift(3, 5), tq + 3, tk + 5)
    np.testing.assert_array_equal(moved[3:, 5:], seen)
    assert moved.sum() == s.area == s.shift(-4, 9).area


@settings(max_examples=600)
@given(attn_masks())
def test_mask_is_the_union_of_its_slices(mask: AttnMask) -> None:
    seen = dense_mask(mask)
    np.testing.assert_array_equal(mask.to_dense().numpy(), seen)
    assert mask.area() == seen.sum()


@settings(max_examples=600)
@given(attn_masks(max_tokens=40, max_slices=10))
def test_row_intervals_are_canonical(mask: AttnMask) -> None:
    seen, intervals = dense_mask(mask), mask.row_intervals()
    assert np.all(intervals.start < intervals.end)
    assert np.all(intervals.start[1:] >= intervals.end[:-1])
    assert np.all(np.diff(intervals.ptr) > 0)
    assert set(np.unique([intervals.lo_slope, intervals.hi_slope]).tolist()) <= {0, 1}
    expanded: dict[int, list[tuple[int, int]]] = {}
    for row, lo, hi in zip(*(x.tolist() for x in intervals.expand()), strict=True):
        expanded.setdefault(row, []).append((lo, hi))
    for i in range(mask.tq):
        found = intervals.of_row(i)
        assert all(lo < hi for lo, hi in found)
        assert all(a[1] < b[0] for a, b in pairwise(found))
        keys = [j for lo, hi in found for j in range(lo, hi)]
        assert keys == np.flatnonzero(seen[i]).tolist()
        assert sorted(expanded.get(i, [])) == found
    assert intervals.of_row(-1) == intervals.of_row(mask.tq) == []
    for n, s in enumerate(intervals.strip.tolist()):
        assert intervals.index[n] == n - intervals.ptr[s]


@settings(max_examples=300)
@given(attn_masks(max_tokens=40))
def test_slices_of_rows_is_the_inverse(mask: AttnMask) -> None:
    row, lo, hi = mask.row_intervals().expand()
    order = np.lexsort((lo, row))
    back = AttnMask(slices_of_rows(row[order], lo[order], hi[order]), *mask.shape)
    np.testing.assert_array_equal(dense_mask(back), dense_mask(mask))
    assert sum(s.area for s in back) == mask.area(), "the slices are disjoint"


@given(st.data(), attn_masks(max_tokens=40))
def test_cut(data: st.DataObject, mask: AttnMask) -> None:
    q, k = data.draw(spans(mask.tq)), data.draw(spans(mask.tk))
    part, seen = mask.cut(q, k), dense_mask(mask)
    assert part.shape == (q[1] - q[0], k[1] - k[0])
    np.testing.assert_array_equal(dense_mask(part), seen[q[0] : q[1], k[0] : k[1]])
    np.testing.assert_array_equal(dense_mask(mask.cut(q=q)), seen[q[0] : q[1]])
    np.testing.assert_array_equal(dense_mask(mask.cut(k=k)), seen[:, k[0] : k[1]])
    assert mask.cut().area() == mask.area()


@given(st.data(), attn_masks(max_tokens=20), st.integers(0, 4))
def test_union(data: st.DataObject, mask: AttnMask, count: int) -> None:
    slices = [data.draw(attn_slices(mask.tq, mask.tk)) for _ in range(count)]
    other = AttnMask(slices, *mask.shape)
    np.testing.assert_array_equal(dense_mask(mask | other), dense_mask(mask) | dense_mask(other))
    assert (mask | other).area() == (other | mask).area()


@given(attn_masks(max_tokens=16))
def test_slices_survive_the_array(mask: AttnMask) -> None:
    again = AttnMask(list(mask), *mask.shape)
    assert again == mask and hash(again) == hash(mask) and len(mask) == mask.num_slices
    assert torch.equal(mask.tensor, torch.from_numpy(np.array(mask.array)))


def test_equality_is_by_value() -> None:
    a = AttnMask([AttnSlice(0, 4, 0, 4, hi=0)], 4, 4)
    assert a == AttnMask.from_ranges([(0, 4)], [(0, 4)], 1, 4, 4)
    assert a != AttnMask([AttnSlice(0, 4, 0, 4)], 4, 4)
    assert a != AttnMask([AttnSlice(0, 4, 0, 4, hi=0)], 4, 5)
    assert a != "mask" and len({a, AttnMask(list(a), 4, 4)}) == 1
    assert repr(a) == "AttnMask(1 slices over 4 x 4, 62.5% attended)"
    assert repr(AttnMask([], 0, 4)) == "AttnMask(0 slices over 0 x 4, nothing attended)"


def test_masks_do_not_change() -> None:
    array = np.array([[0, 4, 0, 4, 0, 0]])
    mask = AttnMask(array, 4, 4)
    array[0, 1] = 2
    assert mask.area() == 4
    with pytest.raises(ValueError, match="read-only"):
        mask.array[0, 0] = 1


def test_pickle_keeps_equality_between_processes() -> None:
    mask = AttnMask([AttnSlice(0, 4, 0, 4, hi=0)], 4, 4)
    assert pickle.loads(pickle.dumps(mask)) == mask
    # Another process salts the hash of bytes differently.
    code = (
        "import pickle, sys; from keel.masks import AttnMask, AttnSlice; "
        "mask = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "same = AttnMask([AttnSlice(0, 4, 0, 4, hi=0)], 4, 4); "
        "sys.exit(0 if mask == same and hash(mask) == hash(same) else 1)"
    )
    subprocess.run([sys.executable, "-c", code, pickle.dumps(mask).hex()], check=True)


def test_large_masks_are_exact() -> None:
    n = 2**31 - 1
    assert AttnMask([AttnSlice(0, n, 0, n)], n, n).area() == n * n
    assert AttnMask([AttnSlice(0, n, 0, n, hi=0)], n, n).area() == n * (n + 1) // 2
    assert AttnSlice(0, n, 0, n, lo=-5, hi=0).area == 6 * n - 15
    both = [AttnSlice(0, n, 0, n, lo=-5, hi=0), AttnSlice(0, n, 0, n, lo=-2, hi=3)]
    assert AttnMask(both, n, n).area() == 9 * n - 15 - 6


def test_from_ranges_takes_what_people_have() -> None:
    want = AttnMask.from_ranges([(0, 2), (2, 4)], [(0, 3), (1, 4)], [1, 2], 4, 4)
    q, k = torch.tensor([[0, 2], [2, 4]]), torch.tensor([[0, 3], [1, 4]])
    assert AttnMask.from_ranges(q, k, torch.tensor([1, 2]), 4, 4) == want
    assert AttnMask.from_ranges(q.int(), k.int(), torch.tensor([1, 2]).int(), 4, 4) == want
    assert AttnMask.from_ranges(q.numpy(), k.numpy(), np.array([1, 2]), 4, 4) == want
    q_ranges, k_ranges = AttnRanges([(0, 2), (2, 4)]), [AttnRange(0, 3), AttnRange(1, 4)]
    assert AttnMask.from_ranges(q_ranges, k_ranges, ["causal", "INV_CAUSAL"], 4, 4) == want
    assert AttnMask.from_ranges([], [], [], 4, 4).area() == 0
    assert AttnMask.from_ranges(q[:0], k[:0], None, 4, 4).num_slices == 0
    assert AttnMask.from_ranges(q, k, None, 4, 4) == AttnMask.from_ranges(q, k, "full", 4, 4)


BAD_RANGES = [
    ([(0, 2.5)], "q_ranges must hold integers, got float64"),
    (torch.tensor([[0.0, 2.0]]), "q_ranges must be int32 or int64, got torch.float32"),
    (torch.tensor([[0, 2, 3]]), r"q_ranges must have shape \(n, 2\), got \(1, 3\)"),
    (torch.tensor([0, 2]), r"q_ranges must have shape \(n, 2\), got \(2,\)"),
    ([0, 2], r"q_ranges must be a list of pairs \(start, end\), got \[0, 2\]"),
    ([(0, 1), (0, 1, 2)], r"q_ranges must be a list of pairs"),
    ([(0, 1), (1, 2)], "same length, got 2 and 1"),
    ([(3, 1)], r"slice 0: q_range \[3, 1\) is reversed"),
    ([(-1, 1)], r"slice 0: q_range \[-1, 1\) starts below 0"),
    ([(0, 5)], r"slice 0: q_range \[0, 5\) ends after the last of 4 tokens"),
]


@pytest.mark.parametrize(("ranges", "message"), BAD_RANGES)
def test_from_ranges_rejects_bad_ranges(ranges: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttnMask.from_ranges(ranges, [(0, 1)], [1], 4, 4)  # type: ignore[arg-type]


def test_errors_name_the_slice_and_side() -> None:
    with pytest.raises(ValueError, match=r"slice 1: k_range \[2, 9\) ends after the last of 8"):
        AttnMask.from_ranges([(0, 1), (1, 2)], [(0, 1), (2, 9)], 1, 4, 8)
    with pytest.raises(ValueError, match=r"k_ranges must have shape"):
        AttnMask.from_ranges([(0, 1)], torch.zeros(1, 3, dtype=torch.int32), 1, 4, 8)


BAD_TYPES = [
    ([4], "unknown mask type 4: expected 0..3"),
    ([-1], "unknown mask type -1"),
    ([0.5], "unknown mask type 0.5"),
    ("diagonal", "unknown mask type 'diagonal'"),
    (True, "unknown mask type True"),
    (7, "unknown mask type 7"),
    ([0, 1], r"must have shape \(1,\), one type per range, got \(2,\)"),
    (torch.tensor([4]), r"attn_type_map\[0\] is 4: expected 0"),
    (torch.tensor([-1]), r"attn_type_map\[0\] is -1"),
    (torch.tensor([1.0]), "attn_type_map must be int32 or int64, got torch.float32"),
    (torch.tensor([[1]]), r"must have shape \(1,\), one type per range, got \(1, 1\)"),
]


@pytest.mark.parametrize(("types", "message"), BAD_TYPES)
def test_from_ranges_rejects_bad_types(types: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttnMask.from_ranges([(0, 1)], [(0, 1)], types, 4, 4)  # type: ignore[arg-type]


def test_mask_rejects_nonsense() -> None:
    with pytest.raises(ValueError, match="tq must be in 0"):
        AttnMask([], -1, 4)
    with pytest.raises(ValueError, match="tk must be in 0"):
        AttnMask([], 4, 2**31)
    with pytest.raises(ValueError, match=r"slice 0: q_range \[0, 5\)"):
        AttnMask([AttnSlice(0, 5, 0, 4)], 4, 4)
    with pytest.raises(ValueError, match=r"shape \(n, 6\), got int64 of shape \(3, 4\)"):
        AttnMask(np.zeros((3, 4), np.int64), 4, 4)
    with pytest.raises(ValueError, match=r"shape \(n, 6\), got float64"):
        AttnMask(np.zeros((1, 6)), 4, 4)  # type: ignore[arg-type]
    mask = AttnMask([], 4, 4)
    with pytest.raises(ValueError, match=r"shapes \(4, 4\) and \(4, 5\)"):
        _ = mask | AttnMask([], 4, 5)
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = mask | 3  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"cut q=\[2, 5\) k=\[0, 4\) leaves the mask"):
        mask.cut(q=(2, 5))
    with pytest.raises(ValueError, match="leaves the mask"):
        mask.cut(k=(3, 2))
