"""The lab's kernels without a GPU: every argument has a value, and grids are what they say."""

from __future__ import annotations

import pytest
import torch

from keel import masks
from keel.kernels import lab

CPU = torch.device("cpu")
NUM_SMS = 4  # what the interpreter counts as


def launched(monkeypatch: pytest.MonkeyPatch, start: object) -> tuple[object, dict, tuple, dict]:
    """(kernel, arguments by name, grid, options) of a launch that is only noted."""
    seen = []

    class Noted:
        def __init__(self, kernel):
            self.kernel, self.arg_names = kernel, kernel.arg_names

        def __getitem__(self, grid):
            def call(*args, **options):
                arguments = dict(zip(self.arg_names, args, strict=True))
                seen.append((self.kernel, arguments, grid, options))

            return call

    with monkeypatch.context() as patch:
        for name in ("observed_fwd_kernel", "traffic_kernel"):
            patch.setattr(lab, name, Noted(getattr(lab, name)))
        start()
    (found,) = seen
    return found


@pytest.mark.parametrize(("persistent", "margin"), [(False, 0), (True, 0), (True, 3)])
def test_attention_on_a_grid_of_its_own(monkeypatch, persistent, margin):
    q, k, v = (torch.randn(1000, h, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
    mask = masks.causal(1000)
    attention = lab.ObservedAttention(q, k, v, mask, persistent=persistent, sm_margin=margin)
    _, arguments, grid, _ = launched(monkeypatch, attention)
    tiles = -(-1000 // arguments["BM"]) * 4
    assert grid == ((NUM_SMS - margin,) if persistent else (tiles,))
    assert arguments["PERSISTENT"] is persistent and arguments["num_work"] == tiles
    assert (arguments["COUNTER"] is not None) == persistent
    assert arguments["RECORD"].shape == (grid[0], lab.RECORD_SIZE)
    assert arguments["Q"] is q and arguments["scale"] == 0.125
    if persistent:
        arguments["COUNTER"].fill_(9)
        launched(monkeypatch, attention)
        assert arguments["COUNTER"].item() == 0  # work begins anew


def test_only_a_persistent_grid_has_a_margin():
    x = torch.randn(8, 1, 64)
    with pytest.raises(ValueError, match="only a persistent grid"):
        lab.ObservedAttention(x, x, x, masks.causal(8), persistent=False, sm_margin=2)


@pytest.mark.parametrize("cluster", [1, 4])
def test_traffic_has_a_rate_and_whole_clusters(monkeypatch, cluster):
    flag = torch.zeros(4, dtype=torch.int64) if cluster > 1 else None
    options = {"span_us": 500, "gb_per_s": 200.0, "device": CPU, "cluster": cluster}
    traffic = lab.Traffic(16, flag=flag, megabytes=2, **options)
    _, arguments, grid, how = launched(monkeypatch, traffic)
    assert grid == (16 // cluster,) and how["num_ctas"] == cluster and how["num_warps"] == 16
    assert arguments["span_ns"] == 500_000 and arguments["MARKS"] == (cluster > 1)
    # 16 blocks, each a chunk of 128 KiB a period
    assert 16 * 2**17 / arguments["period_ns"] == pytest.approx(200, rel=1e-3)
    assert arguments["num_chunks"] * arguments["CHUNK"] == arguments["FROM"].numel() == 2**19
    assert arguments["FROM"].data_ptr() != arguments["TO"].data_ptr()
    traffic.record[:, 3] = 2
    assert traffic.bytes_moved() == 16 * 2 * 2**17
    with pytest.raises(ValueError, match="6 blocks are no whole clusters of 4"):
        lab.Traffic(6, **(options | {"cluster": 4}))
