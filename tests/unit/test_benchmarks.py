"""The parts of the benchmarks that need no GPU: masks, FLOPs, checks, budgets, CSV and tables."""

from __future__ import annotations

import doctest
import sys
import types
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel import reference
from keel.meta import Scoring

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts: they import each other by plain names

import attention  # noqa: E402
import attention_bench  # noqa: E402
import attention_masks  # noqa: E402
import attention_peers  # noqa: E402
import attention_report as report  # noqa: E402
import max_logits  # noqa: E402
import timing  # noqa: E402
import trees  # noqa: E402
from attention_masks import MASKS  # noqa: E402
from exact import TOLERANCE, Exact, worst_error  # noqa: E402
from timing import TimeBudget, Trial, append_csv  # noqa: E402

TOKENS = (600, 1001, 2048)


def _dense_ranges(problem: attention_masks.Problem) -> torch.Tensor:
    start, end = (torch.from_numpy(x)[:, None] for x in problem.row_ranges())
    keys = torch.arange(problem.tokens)
    return (keys >= start) & (keys < end)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", MASKS)
def test_row_ranges_are_the_mask(name: str, tokens: int) -> None:
    """What fp64 checks and FlexAttention are given is what Keel is given."""
    problem = MASKS[name](tokens)
    dense = problem.mask.to_dense()
    assert (problem.name, dense.shape) == (name, (tokens, tokens))
    assert torch.equal(_dense_ranges(problem), dense)
    assert dense.diagonal().all(), "every token sees itself"
    area = int(dense.sum())
    assert problem.flops("forward", 64, 128) == 4 * area * 64 * 128
    assert problem.flops("backward", 64, 128) == 10 * area * 64 * 128
    assert problem.flops("forward", 64, 192, 128) == 2 * area * 64 * (192 + 128)
    assert problem.flops("backward", 64, 192, 128) == 2 * area * 64 * (3 * 192 + 2 * 128)


@pytest.mark.parametrize("name", MASKS)
def test_flex_mask_mod_is_the_mask(name: str) -> None:
    problem = MASKS[name](1500)
    if name == "full":
        return  # called without a block mask
    mod = attention_peers.flex_mask_mod(problem, "cpu")
    i, j = torch.arange(1500)[:, None], torch.arange(1500)
    assert torch.equal(mod(0, 0, i, j), problem.mask.to_dense())


def test_plain_words_for_peers_mean_the_mask() -> None:
    i, j = torch.arange(2048)[:, None], torch.arange(2048)
    for name in ("full", "causal", "swa", "vfull", "vcausal", "tiny"):
        problem = MASKS[name](2048)
        dense = torch.ones(2048, 2048, dtype=torch.bool)
        if problem.causal:
            dense &= i >= j
        if problem.window >= 0:
            dense &= i - j <= problem.window
        if problem.bounds:
            document = torch.bucketize(torch.arange(2048), torch.tensor(problem.bounds), right=True)
            dense &= document[:, None] == document
        assert torch.equal(dense, problem.mask.to_dense()), name


def test_tiny_documents_have_32_to_128_tokens() -> None:
    """And 64k tokens are 1,000 of them."""
    for tokens in (64, 65, 129, 1000, 1024, 8192, 65536):
        bounds = attention_masks.tiny_bounds(tokens)
        assert (bounds[0], bounds[-1]) == (0, tokens)
        lengths = np.diff(bounds)
        assert 32 <= lengths.min() <= lengths.max() <= 128, tokens
    assert len(bounds) == 1001
    assert attention_masks.tiny_bounds(20) == [0, 20]


def test_video_chunks_see_themselves_and_four_before() -> None:
    dense = attention_masks.video_mask(2000).to_dense()
    length = 100  # of the first video, 8 chunks
    for chunk in range(8):
        row = dense[chunk * length + 7]
        expected = torch.zeros(2000, dtype=torch.bool)
        expected[max(0, chunk - 4) * length : (chunk + 1) * length] = True
        assert torch.equal(row, expected)
    assert not dense[800:, :800].any(), "the next video does not see the first"


def test_least_bytes() -> None:
    """q, k, v, out once, and the lse in fp32."""
    problem = MASKS["full"](1024)
    tensors = 1024 * 128 * 2 * (64 + 8 + 8 + 64)
    assert problem.least_bytes("forward", 64, 8, 128) == tensors + 1024 * 64 * 4
    assert problem.least_bytes("backward", 64, 8, 128) == 2 * tensors + 1024 * 64 * 4
    tensors = 1024 * 2 * ((64 + 8) * 192 + (8 + 64) * 128)
    assert problem.least_bytes("forward", 64, 8, 192, 128) == tensors + 1024 * 64 * 4


def _tensors(tokens: int, hq: int, hk: int, d: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    made = [torch.randn(tokens, h, d, generator=draw).bfloat16() for h in (hq, hk, hk, hq)]
    return [x.requires_grad_() for x in made[:3]], made[3]


@pytest.mark.parametrize("name", ["causal", "swa", "vfull", "blockcausal", "video", "tiny"])
def test_exact_is_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk as the oracle does at once, on the heads of one key head."""
    monkeypatch.setattr("exact.SCORES_AT_ONCE", 3 * 300 * 37)
    problem = MASKS[name](300)
    qkv, dout = _tensors(300, 6, 2, 16)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    out, _, top = reference.attention(*wide, problem.mask, Scoring(scale=0.25))
    grads = torch.autograd.grad(out, wide, dout.double())
    for key_head in range(2):
        exact = Exact(problem, qkv, dout, key_head=key_head)
        assert exact.error("forward", [out]) < 1e-9
        assert exact.error("backward", grads) < 1e-9
        torch.testing.assert_close(exact.max_logits, top[exact.q_heads].detach())


def test_chunks_of_the_exact_reference_know_what_logits_have_on_top(monkeypatch) -> None:
    monkeypatch.setattr("exact.SCORES_AT_ONCE", 3 * 300 * 37)
    problem = MASKS["vcausal"](300)
    qkv, dout = _tensors(300, 6, 2, 16)
    bias = torch.randn(6, 300, 300, dtype=torch.float64)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    out, _, top = reference.attention(*wide, problem.mask, Scoring(scale=0.25, bias=bias))
    grads = torch.autograd.grad(out, wide, dout.double())
    added = lambda rows, keys: bias[3:, rows, keys]  # noqa: E731
    exact = Exact(problem, qkv, dout, key_head=1, added=added)
    assert exact.error("forward", [out]) < 1e-9
    assert exact.error("backward", grads) < 1e-9
    torch.testing.assert_close(exact.max_logits, top[exact.q_heads].detach())


def test_values_may_have_other_columns_than_keys(tmp_path: Path) -> None:
    problem = MASKS["vcausal"](300)
    case = attention_bench.Case(problem, 4, 2, 24, 8)
    qkv, dout = case.tensors("cpu", torch.float32)
    assert [x.shape[1:] for x in (*qkv, dout)] == [(4, 24), (2, 24), (2, 8), (4, 8)]
    wide = [x.double().requires_grad_() for x in qkv]
    out = reference.attention(*wide, problem.mask, Scoring(scale=24**-0.5))[0]
    grads = torch.autograd.grad(out, wide, dout.double())
    exact = Exact(problem, qkv, dout, key_head=1)
    assert exact.error("forward", [out]) < 1e-9
    assert exact.error("backward", grads) < 1e-9
    assert str(case).endswith("4:2 heads, d 24/8")
    rows = [_row("keel", 1.0), _row("keel", 1.0, d=192, dv=128), _row("keel", 1.0, d=192)]
    shapes = [report.Shape.of(row) for row in rows]
    assert len(set(shapes)) == len({shape.file_name for shape in shapes}) == 3
    assert str(shapes[1]) == "64:8 heads, d 192/128, graph"
    append_csv(rows, tmp_path / "attention.csv")
    chosen = attention.parser().parse_args(["--dims", "192/128", "128/128"])
    assert chosen.dims == [(192, 128), (128,)]
    kept = attention.chosen_rows(report.read_rows(tmp_path / "attention.csv"), chosen)
    assert [(row.d, row.dv) for row in kept] == [(128, 0), (192, 128)]


@pytest.mark.parametrize("text", ["", "64/", "a", "64/32/16", "0", "64/-8"])
def test_dims_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.parser().parse_args(["--dims", text])
    assert f"head dims are given as 128 or 192/128, got {text!r}" in capsys.readouterr().err


def test_errors_are_seen() -> None:
    problem = MASKS["causal"](640)
    qkv, _ = _tensors(640, 4, 2, 16)
    out = reference.attention(
        *(x.detach().double() for x in qkv), problem.mask, Scoring(scale=0.25)
    )[0]
    exact = Exact(problem, qkv, None, key_head=1)
    assert exact.error("forward", [out.bfloat16()]) < TOLERANCE / 2
    one_row = out.clone()
    one_row[400, 2:] = 0
    assert exact.error("forward", [one_row]) > TOLERANCE
    one_row[400, 2:] = torch.nan
    assert exact.error("forward", [one_row]) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        worst_error([out[:5]], [out])


@pytest.mark.parametrize("name", ["blockcausal", "video"])
def test_fa3_loop_puts_blocks_together(name: str) -> None:
    """With a stand-in for FA3 that is right on one rectangle."""

    def fwd(q, k, v, *options):
        assert options == (None, None, False, -1)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(q.shape[3] ** -0.5).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v), torch.zeros(1)

    def bwd(dout, q, k, v, out, lse, *options):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(fwd(*leaves, *options)[0], leaves, dout)

    problem = MASKS[name](400)
    qkv, dout = _tensors(400, 2, 2, 16)
    qkv = [x.detach().float().requires_grad_() for x in qkv]
    attend = attention_peers._fa3_loop(types.SimpleNamespace(fwd=fwd, bwd=bwd), problem)
    out = attend(*qkv)
    exact = Exact(problem, qkv, dout, key_head=1)
    assert exact.error("forward", [out]) < 1e-5
    assert exact.error("backward", torch.autograd.grad(out, qkv, dout.float())) < 1e-5


def test_who_can_do_what() -> None:
    """The dense masks of "sdpa" go up to 8k tokens; FlexAttention does all."""
    able = {
        name: {
            p for p in attention_peers.PEERS if not attention_peers.why_not(p, MASKS[name](1024))
        }
        - {"flex", "sdpa"}
        for name in MASKS
    }
    assert able == {
        "full": {"fa3", "cudnn", "flash"},
        "causal": {"fa3", "cudnn", "flash"},
        "vfull": {"fa3"},
        "vcausal": {"fa3"},
        "swa": {"fa3"},
        "blockcausal": {"fa3-loop"},
        "tiny": {"fa3"},
        "video": {"fa3-loop"},
    }
    assert "dense mask" in (attention_peers.why_not("sdpa", MASKS["full"](16384)) or "")


@pytest.mark.parametrize("name", ["full", "causal", "swa", "vcausal", "video"])
def test_the_peer_of_cpus_computes_the_mask(name: str) -> None:
    problem = MASKS[name](300)
    qkv, dout = _tensors(300, 4, 2, 16)
    qkv = [x.detach().float().requires_grad_() for x in qkv]
    out = attention_peers.maker("sdpa")(problem)(*qkv)
    exact = Exact(problem, qkv, dout, key_head=1)
    assert exact.error("forward", [out]) < 1e-5
    assert exact.error("backward", torch.autograd.grad(out, qkv, dout.float())) < 1e-5


def test_an_installed_fa3_gets_documents_and_windows() -> None:
    """With a stand-in that only notes what it was asked."""
    asked = []

    def note(*tensors, **rules):
        asked.append((len(tensors), tensors[0].dim(), rules))
        return tensors[0], None  # some versions give the lse as well

    peer = types.SimpleNamespace(flash_attn_func=note, flash_attn_varlen_func=note)
    q = torch.randn(100, 2, 8)
    cu = torch.tensor([0, 40, 100])
    for options in ((None, None, True, 16), (cu, 60, False, -1)):
        out = attention_peers._installed_fa3(peer, options, q, q, q)
        assert torch.equal(out, q)
    assert asked == [
        (3, 4, {"causal": True, "window_size": (16, 0)}),
        (7, 3, {"causal": False, "window_size": (-1, -1)}),
    ]


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_budget_stops_before_a_piece_that_does_not_fit() -> None:
    clock = _Clock()
    budget = TimeBudget(60, clock)
    done = []
    for seconds in (5, 20, 20, 20, 20):
        if not budget.has_room():
            break
        with budget.piece():
            clock.now += seconds
        done.append(seconds)
    assert done == [5, 20, 20]  # 45 s are gone, and pieces take 20
    assert not budget.is_over()
    clock.now += 16
    assert budget.is_over()
    assert TimeBudget(None, clock).has_room()
    assert [TimeBudget(60, clock).has_room(x) for x in (60, 61)] == [True, False]


def test_rounds_end_with_the_budget_but_never_without_a_sample() -> None:
    clock = _Clock()
    trials = {}
    for provider in ("keel", "fa3"):
        trial = Trial(lambda: None)

        def sample(trial: Trial = trial) -> float:
            clock.now += 4
            trial.samples.append(clock.now)
            return 0.0

        trial.sample = sample  # type: ignore[method-assign]
        trials[provider, "forward", "graph"] = trial
    budget = TimeBudget(10, clock)
    attention_bench.take_turns(trials, 5, budget)
    assert [len(t.samples) for t in trials.values()] == [2, 2]  # 8 s, then 16 s
    attention_bench.take_turns(trials, 5, budget)
    assert [len(t.samples) for t in trials.values()] == [3, 3]
    endless = TimeBudget(None, clock)
    attention_bench.take_turns(trials, 5, endless, until=clock.now, clock=clock)
    assert [len(t.samples) for t in trials.values()] == [6, 6]  # a cell over its time: 3 rounds
    attention_bench.take_turns(trials, 5, endless, until=clock.now + 30, clock=clock)
    assert [len(t.samples) for t in trials.values()] == [10, 10]  # 32 s behind 4 rounds


@pytest.mark.parametrize("module", [report, max_logits])
def test_examples(module: types.ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


def test_a_sample_begins_when_its_calls_have_found_their_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(
        timing, "time_batch", lambda call, count, *, lead: seen.append((lead, count)) or 1.0
    )
    for lead_ms, about_ms in ((0, 10), (0, 60), (200, 10), (200, 159), (200, 600), (0.1, 0.01)):
        Trial(lambda: None, budget_ms=100, lead_ms=lead_ms, about_ms=about_ms).sample()
    assert seen == [(3, 10), (0, 1), (20, 10), (2, 1), (1, 1), (3333, 10000)]


def test_spread_of_a_trial() -> None:
    trial = Trial(lambda: None, samples=[1.0, 2.0, 3.0, 4.0, 5.0])
    assert (trial.ms, trial.spread) == (3.0, pytest.approx(2 / 3))


def _row(provider: str, ms: float, **fields) -> report.Row:
    values = {"mask": "causal", "tokens": 8192, "direction": "forward", "timing": "graph"} | fields
    return report.Row(provider=provider, ms=ms, tflops=600 / ms, error=0.003, **values)


def test_csv_grows_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "attention.csv"
    first = [_row("keel", 1.0, run="a"), _row("fa3", 1.25, run="a")]
    append_csv(first, path)
    append_csv([], path)
    append_csv([_row("keel", 2.0, run="b")], path)
    assert report.read_rows(path) == [*first, _row("keel", 2.0, run="b")]
    assert path.read_text().count("mask,tokens") == 1
    with pytest.raises(ValueError, match="other folder"):
        append_csv([max_logits.Row("full", 1024, 30, *[0.0] * 7)], path)


def test_the_csv_of_the_version_before_is_read_and_migrated(tmp_path: Path) -> None:
    path = tmp_path / "attention.csv"
    path.write_text(
        "mask,tokens,provider,direction,ms,tflops,error,hq,hk,d,dtype,gpu,torch,triton,keel\n"
        "full,4096,keel,forward,1.192,461.2,0,64,8,128,bfloat16,NVIDIA H200,2.11,3.6.0,0.1\n"
        'full,4096,keel with max logits,"forward, graph",1.1,483,0,64,8,128,bfloat16,G,2,3,0\n'
    )
    before = report.read_rows(path)
    assert [(r.direction, r.timing, r.ms) for r in before] == [
        ("forward", "eager", 1.192),
        ("forward", "graph", 1.1),
    ]
    report.migrate(path)
    assert report.read_rows(path) == before
    append_csv([_row("keel", 1.0)], path)
    assert len(report.read_rows(path)) == 3


def test_ratios_stay_inside_one_run() -> None:
    rows = [
        _row("keel", 1.0, run="a"),
        _row("fa3", 0.5, run="a"),
        _row("keel", 1.0, run="b"),
        _row("keel:triton", 0.1, run="b"),
        _row("fa3", 1.25, run="b"),
        _row("cudnn", 1.5, run="b"),
        _row("fa3", 0.1, run="c"),  # without Keel: nothing to compare
        _row("keel", 0.1, run="d"),  # nor without a peer
    ]
    (providers,) = report.latest(rows).values()
    assert report.ours(providers) is rows[2]
    assert report.best_peer(providers) is rows[4]
    assert report.ratio(providers) == 1.25
    assert report.ratio({"keel": rows[0]}) is None
    (alone,) = report.latest(rows[-1:]).values()
    assert alone == {"keel": rows[-1]}


def test_a_run_that_asked_slow_peers_alone_hides_no_faster_one() -> None:
    rows = [
        *(_row("keel", 1.0, run="a"), _row("fa3", 1.1, run="a"), _row("flex", 1.05, run="a")),
        *(_row("keel", 1.0, run="b"), _row("fa3", 1.2, run="b")),
        *(_row("keel", 1.0, run="c"), _row("flex", 1.9, run="c"), _row("cudnn", 1.9, run="c")),
    ]
    (providers,) = report.latest(rows).values()
    assert providers == {"keel": rows[3], "fa3": rows[4]}
    assert report.ratio(providers) == 1.2
    faster = [*rows, _row("keel", 1.0, run="d"), _row("cudnn", 1.15, run="d")]
    (providers,) = report.latest(faster).values()
    assert providers["cudnn"] is faster[-1]


def test_table() -> None:
    rows = [
        _row("keel", 1.0, roof_tflops=750.0),
        _row("fa3", 1.25),
        _row("keel", 2.0, direction="backward"),
        _row("keel", 3.0, tokens=1024, mask="video"),
    ]
    assert report.table(rows).splitlines() == [
        "| tokens | mask | Keel | FlashAttention-3 | of best peer | of roof |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1024 | video | 200 / – | – | – | – |",
        "| 8192 | causal | 600 / 300 | 480 / – | 1.25 / – | 0.80 / – |",
    ]


def _empty(provider: str, status: str, **fields) -> report.Row:
    nan = float("nan")
    values = {"mask": "causal", "tokens": 8192, "direction": "forward", "timing": "graph"} | fields
    return report.Row(provider=provider, ms=nan, tflops=nan, error=nan, status=status, **values)


def test_what_failed_is_in_the_tables() -> None:
    """In the place of its figure, in the ratios where Keel has none, and once with its reason."""
    rows = [
        _row("keel", 1.0),
        _row("flash", 2.0),
        _empty("cudnn", "out of memory"),
        _empty("flex", "compile error: LoweringException: no"),
        _empty("keel", "not run: --seconds 5", tokens=65536),
        _row("keel", 1.0, mask="video"),
        _empty("fa3", "unsupported: it has no such mask", mask="video"),
        _empty("flex", "compile error: LoweringException: no", mask="video"),
    ]
    assert report.table(rows).splitlines()[2:] == [
        "| 8192 | causal | 600 | compile error | out of memory | – | 300 | 2.00 |",
        "| 8192 | video | 600 | compile error | – | unsupported | – | – |",
        "| 65536 | causal | not run | – | – | – | – | – |",
    ]
    assert report.ratio_grid(rows).splitlines() == [
        "64:8 heads, d 128, graph, forward: Keel / best peer",
        "mask         8k      64k",
        "causal    2.000  not run",
        "video   no peer        –",
    ]
    portable = report.ratio_grid([_row("keel:triton", 1.0), _row("flash", 2.0)])
    assert portable.splitlines()[-1] == "causal  2.000 triton"
    assert report.reasons(rows) == [
        "flex: compile error: LoweringException: no (causal, video; 2 figures)",
        "keel: not run: --seconds 5 (causal; 1 figures)",
        "fa3: unsupported: it has no such mask (video; 1 figures)",
    ]
    line = report.describe({row.provider: row for row in rows[:3]})
    assert line.endswith("| keel   600 | flash   300, keel 2.000x | cudnn out of memory | 1000 us")


def test_failures_of_other_runs_are_not_shown() -> None:
    rows = [
        _row("keel", 1.0, run="b"),
        _row("fa3", 1.0, run="b"),
        _empty("cudnn", "out of memory", run="a"),
        _empty("flex", "wrong: 0.3", run="b"),
    ]
    assert report.failures(rows) == {("causal", 8192, "forward"): {"flex": rows[3]}}


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate"), "out of memory"),
        (ArithmeticError("relative error 0.3"), "wrong: relative error 0.3"),
        (attention_peers.Missing("no GPU"), "missing: no GPU"),
        (RuntimeError("no kernel\nfor this"), "failed: RuntimeError: no kernel"),
        (torch._dynamo.exc.Unsupported("a thing"), "compile error: Unsupported: a thing"),
    ],
)
def test_status_of_a_failure(problem: Exception, status: str) -> None:
    assert attention_bench.status_of(problem) == status


def test_the_default_run_has_every_mask_length_head_dim_and_kind_of_heads() -> None:
    found = attention.cases(attention.parser().parse_args([]))
    seen = {(c.problem.name, c.problem.tokens) for c in found if (c.hq, c.hk, c.d) == (64, 8, 128)}
    assert seen == {(name, tokens) for name in MASKS for tokens in attention.LENGTHS}
    assert {(c.d, c.dv) for c in found} == {(64, 0), (128, 0), (256, 0), (192, 128)}
    assert {c.hq == c.hk for c in found} == {True, False}
    costs = [c.flops("forward") for c in found]
    assert costs == sorted(costs)


def test_the_command_in_the_csv_names_no_folder() -> None:
    shown = attention.shown_command(["--fa3", "/a/b", "--masks", "full", "--out", "/c"])
    assert shown == "python benchmarks/attention.py --fa3 DIR --masks full --out DIR"


def test_commands_that_need_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = ["--masks", "swa", "video", "--lengths", "2048", "--heads", "32:32"]
    assert attention.main([*narrow, "--dims", "64", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in listed] == ["video 2048, 32", "swa 2048, 32"]
    assert listed[0].endswith("; keel, fa3-loop, flex")

    rows = [_row("keel", 1.0), _row("fa3", 2.0), _row("keel", 1.0, tokens=1024)]
    append_csv(rows, tmp_path / "attention.csv")
    assert attention.main(["--table", "--lengths", "8192", "--out", str(tmp_path)]) == 0
    assert "| 8192 | causal | 600 | 300 | 2.00 |" in capsys.readouterr().out
    picture = tmp_path / "attention-64x8-d128-graph.png"
    of_some = picture.read_bytes()
    assert len(of_some) > 10_000
    assert attention.main(["--table", "--out", str(tmp_path)]) == 0
    assert "| 1024 | causal |" in capsys.readouterr().out
    assert picture.read_bytes() == of_some  # it was of all rows
    with pytest.raises(SystemExit, match="no row of what was asked for"):
        attention.main(["--table", "--lengths", "77", "--out", str(tmp_path)])

    append_csv(
        [max_logits.Row("full", 1024, 40, 0.002, 0.001, 0.003, *[1.0] * 4)],
        tmp_path / "max_logits.csv",
    )
    assert max_logits.main(["--table", "--out", str(tmp_path)]) == 0
    assert "+0.20% (+0.10% .. +0.30%)" in capsys.readouterr().out

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for main in (attention.main, max_logits.main):
        with pytest.raises(SystemExit, match="needs a CUDA GPU"):
            main([])
        with pytest.raises(SystemExit, match="is not there"):
            main(["--table", "--out", str(tmp_path / "nowhere")])


@pytest.mark.parametrize("bad", [["--heads", "64"], ["--heads", "64:7"], ["--masks", "round"]])
def test_bad_arguments_are_refused(bad: list[str]) -> None:
    with pytest.raises(SystemExit):
        attention.main([*bad, "--list"])


@pytest.mark.parametrize("wrong", ["--lead-ms -5", "--sample-ms nan", "--sample-ms inf"])
@pytest.mark.parametrize("program", [attention, trees])
def test_times_that_are_none(wrong, program, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(wrong.split())
    assert f"milliseconds are 0 or more, got {wrong.split()[1]!r}" in capsys.readouterr().err


def test_unknown_names_are_told() -> None:
    with pytest.raises(SystemExit, match="'fa2': one of fa3, "):
        attention.main(["--peers", "fa2", "--list"])
    with pytest.raises(SystemExit, match="'teak' of Keel: one of keel, "):
        attention.main(["--ours", "teak", "--list"])
    with pytest.raises(SystemExit, match="leave --forward"):
        attention.main(["--passes", "forward", "--backward", "--list"])
    with pytest.raises(ValueError, match="unknown peer"):
        attention_peers.maker("fa2")


def test_a_peer_that_is_not_here_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(attention_peers.Missing, match="KEEL_BENCH_FA3"):
        attention_peers.maker("fa3", tmp_path)
    (tmp_path / "fa3_peer.py").write_text("")
    with pytest.raises(attention_peers.Missing, match="Hopper"):
        attention_peers.maker("fa3-loop", tmp_path)
    with pytest.raises(attention_peers.Missing, match="CUDA GPU"):
        attention_peers.maker("cudnn")
    monkeypatch.setenv("KEEL_BENCH_FA3", str(tmp_path))
    assert attention_peers.default_folder() == tmp_path
    monkeypatch.setenv("KEEL_BENCH_FA3", str(tmp_path / "nowhere"))
    assert attention_peers.default_folder() is None


def test_pairs_alternate_and_drift_cancels() -> None:
    """A clock that slows down steadily: single ratios lean both ways, their median does not."""
    log: list[str] = []
    speed = [1.0]

    def trial(name: str, ms: float) -> Trial:
        made = Trial(lambda: None)

        def sample() -> float:
            log.append(name)
            speed[0] += 0.001
            made.samples.append(ms * speed[0])
            return made.samples[-1]

        made.sample = sample  # type: ignore[method-assign]
        return made

    both = [(trial(f"without {n}", 1.0), trial(f"with {n}", 1.002)) for n in range(2)]
    ratios = max_logits.time_pairs(both, 40, TimeBudget(None))
    turns = [f"{kind} {n}" for n in range(2) for kind in ("with", "without", "without", "with")]
    assert log[:16] == turns * 2
    assert [len(x.samples) for pair in both for x in pair] == [20] * 4
    assert max_logits.pooled([both[0][0], both[1][0]]) == pytest.approx(1.0, abs=0.1)
    median, low, high = max_logits.median_interval(ratios)
    assert len(ratios) == 40
    assert median == pytest.approx(1.002, abs=1e-4)
    assert low <= median <= high
    assert min(ratios) < 1.0015 < 1.0025 < max(ratios)


def test_interval_of_a_median_holds_it_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    runs = draw.normal(1.0, 0.01, (500, 40))
    intervals = [max_logits.median_interval(x, resamples=400, seed=n) for n, x in enumerate(runs)]
    inside = sum(low <= 1.0 <= high for _, low, high in intervals)
    assert 0.91 * 500 <= inside <= 0.98 * 500


def test_max_logits_are_checked() -> None:
    problem = MASKS["causal"](320)
    qkv, _ = _tensors(320, 4, 2, 16)
    wide = [x.detach().double() for x in qkv]
    out, _, top = reference.attention(*wide, problem.mask, Scoring(scale=0.25))
    exact = Exact(problem, qkv, None, key_head=1)
    max_logits.check(exact, out.bfloat16(), top.float())
    max_logits.check(exact, out.bfloat16(), None)
    for wrong in (top * 1.001, top * torch.nan):
        with pytest.raises(ArithmeticError, match="wrong result"):
            max_logits.check(exact, out, wrong)


def test_a_graph_keeps_what_its_call_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured backward reads what autograd saved; freed, replays would read anything."""
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "graph": lambda *_, **__: nullcontext(),
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timing, "time_batch", lambda *_, **__: 1.0)
    saved = []

    def prepare() -> Any:
        kept = torch.zeros(3)
        saved.append(weakref.ref(kept))
        return lambda: kept.sum()

    replay, count, result = timing.capture(prepare)
    assert count == 2 and float(result) == 0.0
    assert saved[0]() is not None
    del replay, result
    assert saved[0]() is None
