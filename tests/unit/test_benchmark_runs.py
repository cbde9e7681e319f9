"""Whole runs of the attention benchmarks without a GPU: only clocks and graphs are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts: plain names

import attention
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

    for module in (attention, max_logits):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(attention, "poison_free_memory", lambda num_bytes: None)
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
    providers = ["--providers", "flex", "cudnn", "fa3", "keel"]
    assert attention.main([*command.split(), *providers, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "fa3 left out: FileNotFoundError" in printed
    assert "cudnn forward left out: RuntimeError: no kernel\n" in printed
    assert "flex backward left out: ArithmeticError: wrong result" in printed
    rows = report.read_rows(tmp_path / "attention.csv")
    assert {(r.mask, r.provider, r.direction, r.timing): r.ms for r in rows} == {
        (mask, provider, direction, timing): 0.5 if timing == "graph" else 2.0
        for mask in ("causal", "video")
        for provider, direction in (("keel", "forward"), ("keel", "backward"), ("flex", "forward"))
        for timing in ("graph", "eager")
    }
    causal = next(r for r in rows if (r.mask, r.timing) == ("causal", "graph"))
    flops = 4 * (96 * 97 // 2) * 4 * 16
    assert causal.tflops == pytest.approx(flops / 0.5e-3 / 1e12, rel=1e-3)
    assert causal.roof_tflops == pytest.approx(
        flops / (96 * (2 * 6 * 16 * 2 + 4 * 4)) * 4.0, rel=1e-3
    )
    assert 0 < causal.error < TOLERANCE
    assert (causal.gpu, causal.hq, causal.hk, causal.d) == ("none", 4, 2, 16)


@pytest.mark.usefixtures("without_gpu")
def test_a_wrong_result_of_keel_is_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that only its graph gets wrong."""
    right = attention_peers._keel(True, "auto", MASKS["causal"](96))
    command = "--masks causal --lengths 96 --dims 16 --heads 4:2 --direction forward --no-plots"
    arguments = [*command.split(), "--providers", "keel", "--out", str(tmp_path)]
    monkeypatch.setattr(attention_peers, "_keel", lambda *_: lambda q, k, v: right(q, k, v) * 1.1)
    assert attention.main(arguments) == 1
    assert not (tmp_path / "attention.csv").exists()
    monkeypatch.setattr(attention_peers, "_keel", lambda *_: right)
    monkeypatch.setattr(attention, "capture", lambda prepare: (lambda: None, 1, prepare()()))
    assert attention.main(arguments) == 1
    assert "graph of keel forward left out: ArithmeticError: wrong" in capsys.readouterr().out
    assert [row.timing for row in report.read_rows(tmp_path / "attention.csv")] == ["eager"]


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
