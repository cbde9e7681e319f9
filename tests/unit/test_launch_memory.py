"""What launches need beside their tensors is shared with no other: maxima, parts, counters."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are stand-ins here, not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from tests.stub_cases import (
    HK,
    HQ,
    TOKENS,
    D,
    Stub,
    attend,
    last_launch,
)

from keel import direct, masks
from keel.kernels import (
    fresh_maxima,
    hopper_launch,
    hopper_tiles,
)


def test_maxima_share_nothing_but_memory() -> None:
    fresh_maxima._ready.clear()
    with torch.inference_mode():
        rows = [fresh_maxima.fresh_maxima(5, torch.device("cpu"), 3) for _ in range(40)]
    assert len({x.data_ptr() for x in rows}) == 40
    assert all(x.shape == (5,) and x.data_ptr() % 16 == 0 for x in rows)
    assert all((x == -torch.inf).all() for x in rows)
    rows[0].fill_(1.0)
    assert (rows[0]._version, rows[1]._version) == (1, 0)
    assert all((x == -torch.inf).all() for x in rows[1:]) and not rows[0]._is_view()


def test_one_fill_of_maxima_for_many_calls_of_a_capture(monkeypatch) -> None:
    monkeypatch.setattr(fresh_maxima, "_in_capture", {})
    monkeypatch.setattr(fresh_maxima, "NUM_ROWS", 4)
    current: list[tuple[int, int] | None] = [(7, 1)]
    monkeypatch.setattr(fresh_maxima, "capture_id", lambda index: current[0])

    def fills(calls: int, heads: int = 5) -> list[int]:
        rows = [fresh_maxima.fresh_maxima(heads, torch.device("cpu"), None) for _ in range(calls)]
        assert all(row.shape == (heads,) and (row == -torch.inf).all() for row in rows)
        assert len({row.data_ptr() for row in rows}) == calls
        kept.extend(rows)
        return [row.untyped_storage().data_ptr() for row in rows]

    kept: list[torch.Tensor] = []
    first = fills(6)
    assert len(set(first[:4])) == 1 and first[4] == first[5] != first[0]
    assert set(fills(1, heads=6)).isdisjoint(first)
    for other in ((7, 2), (8, 2), None):  # the next capture, another stream of it, unknown
        current[0] = other
        assert set(fills(1)).isdisjoint(first)


def test_parts_of_tiles_get_memory_of_their_own(stub: Stub, monkeypatch) -> None:
    """New memory for each launch; counters for each stream, which launches leave at zero."""
    monkeypatch.setattr(hopper_tiles, "_meetings", {})
    mask = masks.full(TOKENS, 2048)  # one tile for each of four heads, and 132 SMs
    q = torch.randn(TOKENS, HQ, D).bfloat16()
    k, v = (torch.randn(2048, HK, D).bfloat16() for _ in range(2))
    _, cut, _ = hopper_tiles.few_tiles(mask, (64, 128), HQ, 132, False)
    assert cut is not None and cut.num_cut == 1
    kept, sizes = [], []
    between = hopper_launch.between_parts

    def keep(numbers: int, *where: Any) -> Any:
        kept.append(between(numbers, *where))
        sizes.append(numbers)
        return kept[-1]

    monkeypatch.setattr(hopper_launch, "between_parts", keep)
    sent = []
    for stream in (0, 0, 0, 5):
        monkeypatch.setattr(direct, "launch_stream", lambda index, stream=stream: stream)
        attend(q, k, v, mask)
        sent.append(last_launch(stub) if len(stub.launches) else {})
    later = [x for x in sent if x]
    assert len(later) == 3
    assert [x["PARTS"] for x in later] == [x["PARTS"].data_ptr() for x in kept[1:]]
    assert [x["MEETINGS"] for x in later] == [x["MEETINGS"].data_ptr() for x in kept[1:]]
    assert len({x["PARTS"] for x in later}) == 3
    assert later[0]["MEETINGS"] == later[1]["MEETINGS"] != later[2]["MEETINGS"]
    rows = cut.most_parts * HQ * 128
    assert set(sizes) == {rows * (D + 8)} and all(x["PARTS"].numel() == sizes[0] for x in kept)
    attend(q[:, :, :], k[:TOKENS], v[:TOKENS])  # not cut: none of it
    attend(q[:, :, :], k[:TOKENS], v[:TOKENS])
    assert last_launch(stub)["PARTS"] is last_launch(stub)["MEETINGS"] is None


def test_meetings_of_graphs_are_their_own(monkeypatch) -> None:
    for name in ("_meetings", "_spares"):
        monkeypatch.setattr(hopper_tiles, name, {})
    monkeypatch.setattr(hopper_tiles, "NUM_SPARES", 4)
    cpu = torch.device("cpu")
    before = hopper_tiles.meetings(cpu, None)
    one, other = hopper_tiles.meetings(cpu, 1), hopper_tiles.meetings(cpu, 2)
    assert hopper_tiles.meetings(cpu, 1) is one
    rows = [before, one, other, *(hopper_tiles.meetings(cpu, None) for _ in range(6))]
    assert len({x.data_ptr() for x in rows}) == 9
    assert all(x.numel() == hopper_tiles.NUM_MEETINGS and not x.any() for x in rows)


def test_a_counter_for_each_stream_and_launch_of_a_graph(monkeypatch) -> None:
    for name in ("_counters", "_spare_counters"):
        monkeypatch.setattr(hopper_launch, name, {})
    monkeypatch.setattr(hopper_launch, "NUM_SPARES", 4)
    current: list[int | None] = [None]
    monkeypatch.setattr(hopper_launch, "_stream_of", lambda device: current[0])
    cpu = torch.device("cpu")
    before = hopper_launch.work_counter(0, cpu)  # a graph that nothing was called before
    one, other = hopper_launch.work_counter(0, cpu, 1), hopper_launch.work_counter(0, cpu, 2)
    assert hopper_launch.work_counter(0, cpu, 1) is one is not other
    in_graphs = [hopper_launch.work_counter(0, cpu) for _ in range(6)]
    places = {x.data_ptr() for x in (before, one, other, *in_graphs)}
    assert len(places) == 9 and all(x.tolist() == [0] for x in (before, one, *in_graphs))
    assert all(x.data_ptr() % 16 == 0 for x in (one, *in_graphs))  # as compiled kernels expect
