"""The parts of the benchmarks that need no GPU: masks, FLOPs, checks, budgets, CSV and tables."""

from __future__ import annotations

import doctest
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from keel import reference
from keel.meta import Scoring

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts: they import each other by plain names

import attention  # noqa: E402
import attention_masks  # noqa: E402
import attention_peers  # noqa: E402
import attention_report as report  # noqa: E402
import max_logits  # noqa: E402
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


@pytest.mark.parametrize("tokens", [1024, 8192, 65536])
def test_tiny_has_a_thousand_documents(tokens: int) -> None:
    bounds = attention_masks.tiny_bounds(tokens)
    assert len(bounds) == 1001
    assert (bounds[0], bounds[-1]) == (0, tokens)
    assert min(np.diff(bounds)) >= 1


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
    able = {
        name: {p for p in attention_peers.PROVIDERS if attention_peers.can_do(p, MASKS[name](1024))}
        - {"keel", "keel-plain", "flex"}
        for name in MASKS
    }
    assert able == {
        "full": {"fa3", "cudnn"},
        "causal": {"fa3", "cudnn"},
        "vfull": {"fa3"},
        "vcausal": {"fa3"},
        "swa": {"fa3"},
        "blockcausal": {"fa3-loop"},
        "tiny": {"fa3"},
        "video": {"fa3-loop"},
    }


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
    attention.take_turns(trials, 5, budget)
    assert [len(t.samples) for t in trials.values()] == [2, 2]  # 8 s, then 16 s
    attention.take_turns(trials, 5, budget)
    assert [len(t.samples) for t in trials.values()] == [3, 3]


@pytest.mark.parametrize("module", [report, max_logits])
def test_examples(module: types.ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


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


def test_commands_that_need_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = ["--masks", "swa", "video", "--lengths", "2048", "--heads", "32:32"]
    assert attention.main([*narrow, "--dims", "64", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in listed] == ["swa 2048, 32", "video 2048, 32"]
    assert listed[1].endswith("; keel, fa3-loop")

    rows = [_row("keel", 1.0), _row("fa3", 2.0), _row("keel", 1.0, tokens=1024)]
    append_csv(rows, tmp_path / "attention.csv")
    assert attention.main(["--table", "--lengths", "8192", "--out", str(tmp_path)]) == 0
    assert "| 8192 | causal | 600 | 300 | 2.00 |" in capsys.readouterr().out
    assert (tmp_path / "attention-64x8-d128-graph.png").stat().st_size > 10_000

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


def test_unknown_provider_is_named() -> None:
    with pytest.raises(SystemExit, match="fa2"):
        attention.main(["--providers", "keel", "fa2", "--list"])
    with pytest.raises(FileNotFoundError, match="--peers"):
        attention_peers.maker("fa3", None)


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

    ratios = max_logits.time_pairs(
        trial("without", 1.0), trial("with", 1.002), 40, TimeBudget(None)
    )
    assert log[:4] == ["with", "without", "without", "with"]
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
