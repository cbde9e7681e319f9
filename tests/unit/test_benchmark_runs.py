"""Whole runs of the attention benchmarks without a GPU: only clocks and graphs are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts: plain names

import attention
import attention_bench
import attention_peers
import attention_report as report
import max_logits
from attention_masks import MASKS
from exact import TOLERANCE


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go through on the CPU: every call takes 2 ms, and a graph is a call into old tensors."""

    def capture(prepare):
        call = prepare()
        result = call()

        def replay() -> None:
            old = result if isinstance(result, tuple) else (result,)
            again = call()
            for x, y in zip(old, again if isinstance(again, tuple) else (again,), strict=True):
                if x is not None:
                    x.detach().copy_(y.detach())

        return replay, 4, result

    for module in (attention_bench, max_logits):
        monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(max_logits, "DEVICE", "cpu")
    tensors = attention_bench.Case.tensors
    monkeypatch.setattr(
        attention_bench.Case, "tensors", lambda case, device, dtype: tensors(case, "cpu", dtype)
    )
    monkeypatch.setattr(attention_bench, "poison_free_memory", lambda num_bytes: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def time_batch(call, count, lead):
        call()
        return 2.0

    monkeypatch.setattr(attention_bench, "time_batch", time_batch)
    monkeypatch.setattr(attention, "gemm_rate", lambda: 700.0)
    monkeypatch.setattr(attention, "copy_rate", lambda: 4.0)
    monkeypatch.setattr("timing.time_batch", lambda call, count, lead: 2.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")


@pytest.mark.usefixtures("without_gpu")
def test_a_run_checks_times_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer whose gradients are wrong keeps its forward; one that raises is left out."""

    def flex(problem):
        class WrongGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                ctx.save_for_backward(q, k, v)
                return attention_peers._keel(False, "auto", problem)(q, k, v)

            @staticmethod
            def backward(ctx, dout):
                return tuple(map(torch.zeros_like, ctx.saved_tensors))

        return WrongGradient.apply

    def cudnn(problem):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(attention_peers, "_flex", flex)
    monkeypatch.setattr(attention_peers, "_cudnn", cudnn)
    command = "--masks causal video --lengths 96 --dims 16 --heads 4:2 --rounds 3 --no-plots"
    peers = ["--peers", "flex", "cudnn", "fa3", "fa3-loop", "--fa3", str(tmp_path)]
    assert attention.main([*command.split(), *peers, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "cudnn forward graph: failed: RuntimeError: no kernel\n" in printed
    assert "flex backward eager: wrong: relative error" in printed
    assert "cudnn: unsupported: torch's fused attention knows full and causal" in printed
    rows = report.read_rows(tmp_path / "attention.csv")
    assert {(r.mask, r.provider, r.direction, r.timing): r.ms for r in rows if r.ok} == {
        (mask, provider, direction, timing): 0.5 if timing == "graph" else 2.0
        for mask in ("causal", "video")
        for provider, direction in (("keel", "forward"), ("keel", "backward"), ("flex", "forward"))
        for timing in ("graph", "eager")
    }
    words = {(r.mask, r.provider, r.direction, r.word) for r in rows if not r.ok}
    assert words == {
        *(("causal", "cudnn", d, "failed") for d in ("forward", "backward")),
        *(("video", "cudnn", d, "unsupported") for d in ("forward", "backward")),
        *((m, "flex", "backward", "wrong") for m in ("causal", "video")),
        *((m, "fa3", d, "missing") for m in ("causal", "video") for d in ("forward", "backward")),
        *(("video", "fa3-loop", d, "missing") for d in ("forward", "backward")),
    }
    causal = next(r for r in rows if (r.mask, r.timing) == ("causal", "graph"))
    flops = 4 * (96 * 97 // 2) * 4 * 16
    assert causal.tflops == pytest.approx(flops / 0.5e-3 / 1e12, rel=1e-3)
    assert causal.roof_tflops == pytest.approx(
        flops / (96 * (2 * 6 * 16 * 2 + 4 * 4)) * 4.0, rel=1e-3
    )
    assert 0 < causal.error < TOLERANCE
    assert (causal.gpu, causal.hq, causal.hk, causal.d) == ("none", 4, 2, 16)
    assert (causal.rounds, causal.lead_ms, causal.dtype) == (3, 200.0, "bfloat16")
    assert causal.command.startswith("python benchmarks/attention.py --masks causal video")
    assert str(tmp_path) not in causal.command
    last = printed[printed.index("4:2 heads, d 16, graph, backward: Keel / best peer") :]
    assert last.splitlines()[1:4] == ["mask         96", "causal  no peer", "video   no peer"]


@pytest.mark.usefixtures("without_gpu")
def test_long_calls_are_not_timed_twice_and_long_cells_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager time of a call of 10 ms is its graph time; a cell beyond --seconds is told."""

    def time_batch(call, count, lead):
        call()
        return 44.0  # four calls inside

    monkeypatch.setattr(attention_bench, "time_batch", time_batch)
    command = "--masks full --lengths 64 96 --dims 16 --heads 4:2 --forward --no-plots"
    expected = attention_bench.Bench.expected_s
    monkeypatch.setattr(
        attention_bench.Bench,
        "expected_s",
        lambda bench, case: 1e6 if case.problem.tokens > 64 else expected(bench, case),
    )
    assert attention.main([*command.split(), "--peers", "sdpa", "--out", str(tmp_path)]) == 0
    rows = report.read_rows(tmp_path / "attention.csv")
    assert [(r.tokens, r.provider, r.timing, r.status) for r in rows] == [
        (64, "keel", "graph", "ok"),
        (64, "sdpa", "graph", "ok"),
        (64, "keel", "eager", "as graph"),
        (64, "sdpa", "eager", "as graph"),
    ]
    assert capsys.readouterr().out.count("full  1.000  not run") == 1


def test_a_quick_run_needs_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is a stand-in: a CPU is timed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(attention, "gemm_rate", lambda: 0.05)
    monkeypatch.setattr(attention, "copy_rate", lambda: 0.01)
    command = "--quick --masks full vcausal --lengths 128 --rounds 2 --sample-ms 2"
    assert attention.main([*command.split(), "--out", str(tmp_path)]) == 0
    rows = report.read_rows(tmp_path / "attention.csv")
    assert {(r.mask, r.provider, r.direction) for r in rows if r.ok} == {
        (mask, provider, direction)
        for mask in ("full", "vcausal")
        for provider in ("keel", "sdpa")
        for direction in ("forward", "backward")
    }
    assert all(r.dtype == "float32" and r.gpu.startswith("CPU") and r.rounds == 2 for r in rows)
    assert not any(r.lead_ms for r in rows)
    assert all(0 < r.ms < 10_000 and r.error < 1e-4 for r in rows)
    assert (tmp_path / "attention-4x2-d64-eager.png").stat().st_size > 10_000
    assert "4:2 heads, d 64, eager, backward: Keel / best peer" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_a_wrong_result_of_keel_is_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that only its graph gets wrong."""
    right = attention_peers._keel(True, "auto", MASKS["causal"](96))
    command = "--masks causal --lengths 96 --dims 16 --heads 4:2 --direction forward --no-plots"
    arguments = [*command.split(), "--peers", "none", "--out", str(tmp_path)]
    monkeypatch.setattr(attention_peers, "_keel", lambda *_: lambda q, k, v: right(q, k, v) * 1.1)
    assert attention.main(arguments) == 1
    rows = report.read_rows(tmp_path / "attention.csv")
    assert [row.word for row in rows] == ["wrong", "wrong"]
    monkeypatch.setattr(attention_peers, "_keel", lambda *_: right)
    monkeypatch.setattr(attention_bench, "capture", lambda prepare: (lambda: None, 1, prepare()()))
    assert attention.main(arguments) == 1
    assert "keel forward graph: wrong: relative error inf" in capsys.readouterr().out
    rows = report.read_rows(tmp_path / "attention.csv")[2:]
    assert [(row.timing, row.word) for row in rows] == [("eager", "ok"), ("graph", "wrong")]


@pytest.mark.usefixtures("without_gpu")
def test_a_run_of_max_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_logits, "HQ", 4)
    monkeypatch.setattr(max_logits, "HK", 2)
    monkeypatch.setattr(max_logits, "D", 16)
    arguments = ["--lengths", "64", "--pairs", "30", "--out", str(tmp_path)]
    assert max_logits.main(arguments) == 0
    rows = max_logits.read_rows(tmp_path / "max_logits.csv")
    assert [(r.mask, r.pairs, r.cost, r.ms_with) for r in rows] == [
        (kind, 30, 0.0, 0.5) for kind in ("full", "causal", "vfull", "vcausal")
    ]
    with pytest.raises(SystemExit):
        max_logits.main(["--pairs", "29"])


def test_flex_compiles_only_where_asked() -> None:
    """By default in one length of one shape; elsewhere its place says so."""
    bench = attention_bench.Bench(
        {"flex": attention_peers._flex}, ("forward",), ("graph",), 5, 20.0, None, 700.0, 4.0
    )
    main, other = (
        attention_bench.Case(MASKS["video"](8192), *x) for x in ((64, 8, 128), (8, 8, 64))
    )
    assert bench.reason_against("flex", main) is None
    assert bench.reason_against("flex", other).startswith("not run: compiles slowly")
    bench.flex_cells = None
    assert bench.reason_against("flex", other) is None
