"""Row layouts: who owns which rows, and every way in which a spec can be wrong."""

from __future__ import annotations

import pytest
import torch

from keel.optim import (
    Block,
    ClippedRows,
    LayerSpec,
    Role,
    grouped_rows,
    interleaved_rows,
    key_rows,
    mla_key_rows,
    mla_query_rows,
    query_rows,
    stacked_rows,
)
from keel.optim.clip_table import ClipTable


def owners(layout: tuple[Block, ...]) -> list[str]:
    """One word for each row."""
    letters = {Role.Q: "q", Role.K: "k", Role.REST: "-", Role.Q_WHOLE: "Q"}
    words = []
    for block in layout:
        head = "" if block.role is Role.REST else str(block.head)
        words += [letters[block.role] + head] * block.rows
    return words


def test_layouts_name_every_row() -> None:
    assert owners(query_rows(2, 2)) == ["q0", "q0", "q1", "q1"]
    assert owners(key_rows(1, 2)) == ["k0", "k0"]
    assert owners(stacked_rows(2, 1, 1, 2)) == ["q0", "q1", "k0", "-", "-"]
    assert owners(grouped_rows(4, 2, 1)) == ["q0", "q1", "k0", "-", "q2", "q3", "k1", "-"]
    assert owners(grouped_rows(4, 2, 1, gate=True)) == [
        *("q0", "q1", "-", "-", "k0", "-"),
        *("q2", "q3", "-", "-", "k1", "-"),
    ]
    assert owners(interleaved_rows(2, 1)) == ["q0", "k0", "-", "q1", "k1", "-"]
    assert owners(mla_query_rows(2, 1, 2)) == ["q0", "Q0", "Q0", "q1", "Q1", "Q1"]
    assert owners(mla_query_rows(2, 1, 0)) == ["q0", "q1"]
    assert owners(mla_key_rows(2, 2, 1)) == ["k0", "k0", "-", "k1", "k1", "-"]


def spec(**changes: object) -> LayerSpec:
    linear = torch.nn.Linear(8, 32)
    fields = {
        "name": "layer 3",
        "num_heads": 4,
        "num_kv_heads": 2,
        "rows": (ClippedRows(linear, query_rows(4, 8), "wq"),),
    }
    return LayerSpec(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "layer 3: 3 query heads are not a multiple of 2"),
        ({"num_heads": 0}, "num_heads of layer 3 must be a positive int"),
        ({"num_kv_heads": "2"}, "num_kv_heads of layer 3 must be a positive int"),
        ({"rows": ()}, "layer 3 names no rows"),
        (
            {"rows": (ClippedRows(torch.zeros(33, 4), query_rows(4, 8), "wq"),)},
            r"wq of layer 3 has shape \(33, 4\), but the row layout describes 32 rows",
        ),
        (
            {"rows": (ClippedRows(torch.nn.Linear(8, 24), query_rows(4, 8), "wq"),)},
            r"wq.weight of layer 3 has shape \(24, 8\)",
        ),
        (
            {"rows": (ClippedRows(torch.zeros(40, 4), query_rows(5, 8), "wq"),)},
            "wq of layer 3 speaks of Q head 4, but there are 4",
        ),
        (
            {"rows": (ClippedRows(torch.zeros(24, 4), key_rows(3, 8), "wk"),)},
            "wk of layer 3 speaks of K head 2, but there are 2",
        ),
        (
            {"rows": (ClippedRows(torch.zeros(32, 4).int(), query_rows(4, 8), "wq"),)},
            "wq of layer 3 is torch.int32",
        ),
        (
            {"rows": (ClippedRows(torch.nn.ReLU(), query_rows(4, 8), "wq"),)},
            r"wq \(ReLU\) has no weight",
        ),
    ],
)
def test_wrong_specs_name_the_parameter(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_a_parametrized_weight_is_refused() -> None:
    linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 32))
    with pytest.raises(ValueError, match=r"wq.weight is not a plain parameter"):
        spec(rows=(ClippedRows(linear, query_rows(4, 8), "wq"),))


def test_groups_must_divide() -> None:
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2"):
        grouped_rows(5, 2, 8)


GAMMAS = torch.tensor([0.5, 1.0, 0.25, 0.125], dtype=torch.float64)


def factors_of(table: ClipTable, gammas: torch.Tensor) -> torch.Tensor:
    """Read twice: with other gammas before, of which nothing may be left."""
    factors = table.on(gammas.device, gammas.dtype)
    factors.gammas.fill_(0.01)
    factors.now()
    factors.gammas.copy_(gammas)
    return factors.now()


@pytest.mark.parametrize(
    ("mode", "kv_heads", "queries", "keys"),
    [
        ("q_only", 4, [0.5**0.3, 1, 0.25**0.3, 0.125**0.3], [0.5**0.7, 1, 0.25**0.7, 0.125**0.7]),
        ("q_only", 2, [0.5, 1, 0.25, 0.125], [1, 1]),
        (
            *("compensated", 2),
            [0.5 / 0.5**0.7, 1 / 0.5**0.7, 0.25 / 0.125**0.7, 0.125 / 0.125**0.7],
            [0.5**0.7, 0.125**0.7],
        ),
        ("group", 2, [0.5**0.3, 0.5**0.3, 0.125**0.3, 0.125**0.3], [0.5**0.7, 0.125**0.7]),
        ("group", 1, [0.125**0.3] * 4, [0.125**0.7]),
    ],
)
def test_factors_of_each_mode(mode, kv_heads, queries, keys) -> None:
    table = ClipTable(0.3, mode, 4)
    where = {"first_gamma": 0, "heads": range(4), "kv_heads": range(kv_heads)}
    q = table.rows_of(query_rows(4, 1), **where)
    k = table.rows_of(key_rows(kv_heads, 1), **where)
    factors = factors_of(table, GAMMAS)
    torch.testing.assert_close(factors[q], torch.tensor(queries, dtype=torch.float64))
    torch.testing.assert_close(factors[k], torch.tensor(keys, dtype=torch.float64))
    assert (factors_of(table, torch.ones(4)) == 1).all()


def test_a_gain_that_heads_share_takes_the_smallest_gamma() -> None:
    table = ClipTable(0.3, "q_only", 6)
    layout = (Block(Role.LAYER_Q, 0, 2), Block(Role.LAYER_K, 0, 1))
    where = {"heads": range(3), "kv_heads": range(3)}
    places = table.rows_of(layout, first_gamma=3, **where)
    gammas = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.5, 0.7], dtype=torch.float64)
    factors = factors_of(table, gammas)[places]
    torch.testing.assert_close(
        factors, torch.tensor([0.5**0.3, 0.5**0.3, 0.5**0.7], dtype=torch.float64)
    )
