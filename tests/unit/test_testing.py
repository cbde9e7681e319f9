"""The judge itself: what it lets pass and what it does not."""

from __future__ import annotations

import pytest
import torch

from keel import masks
from keel.testing import Case, assert_right, compare, judge, poisoned_memory, run_case

INF, NAN = float("inf"), float("nan")


def verdict(got: list[float], ref: list[float], low: list[float] | None = None) -> bool:
    low_tensor = torch.tensor(ref if low is None else low, dtype=torch.float32)
    want = torch.tensor(ref).double()
    return compare("x", torch.tensor(got), low_tensor, want, torch.float32).ok


def test_the_rule() -> None:
    assert verdict([1.0, 2.0], [1.0, 2.0])
    assert not verdict([1.0, 2.01], [1.0, 2.0])
    assert verdict([1.0, 2.01], [1.0, 2.0], low=[1.0, 2.006])  # twice what plain torch gets wrong
    assert not verdict([1.0, 2.01], [1.0, 2.0], low=[1.0, 2.004])


def test_infinities_and_nan() -> None:
    assert verdict([-INF, 1.0], [-INF, 1.0])
    for wrong in ([INF, 1.0], [-1e30, 1.0], [NAN, 1.0], [-INF, NAN], [-INF, INF]):
        assert not verdict(wrong, [-INF, 1.0])


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"x: shape \(2,\), expected \(1,\)"):
        compare("x", torch.zeros(2), torch.zeros(1), torch.zeros(1).double(), torch.float32)


def test_poisoned_memory() -> None:
    with poisoned_memory():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()
        assert torch.empty(2, dtype=torch.int32).dtype == torch.int32
    assert torch.empty.__name__ == "empty"


@pytest.mark.parametrize("name", ["out", "lse", "max_logits", "dq", "dk", "dv", "dsink", "dbias"])
def test_every_tensor_is_judged(name: str) -> None:
    case = Case(mask=masks.causal(20), sink=True, bias_shape=(2, 20, 20))
    got = run_case(case, backend="blocked")
    assert all(c.ok for c in judge(case, got))
    got[name] = got[name] * 1.01
    assert [c.name for c in judge(case, got) if not c.ok] == [name]


def test_assert_right_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(mask=masks.causal(20))
    assert_right(case, backend="blocked")
    monkeypatch.setattr(
        "keel.testing.run_case",
        lambda *_, **__: run_case(case, backend="blocked") | {"dv": torch.zeros(20, 1, 16)},
    )
    with pytest.raises(AssertionError, match=r"dv: error .* allowed"):
        assert_right(case, backend="blocked")


@pytest.mark.parametrize("bias_shape", [(4, 150, 150), (4, 1, 150), (1, 150, 1), (1, 1, 150)])
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dsink", "dbias"])
def test_a_tenth_too_much_is_caught(name, bias_shape):
    """Floors and roundings leave the rule its teeth, for sums over rows as well."""
    mask = masks.causal(150)
    case = Case(mask=mask, hq=4, hk=2, d=32, dtype=torch.float16, sink=True, bias_shape=bias_shape)
    got = run_case(case, backend="blocked")
    assert all(c.ok for c in judge(case, got))
    wrong = judge(case, got | {name: got[name] * 1.1})
    assert [c.name for c in wrong if not c.ok] == [name]
