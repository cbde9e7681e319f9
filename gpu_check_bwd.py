"""Hopper backward on a GPU: right on many masks, or timed.

    PYTHONPATH=src python gpu_check_bwd.py                 # all families, each in its own process
    PYTHONPATH=src python gpu_check_bwd.py --only NAME ... # these families, here, with every line
    PYTHONPATH=src python gpu_check_bwd.py --times [--peers DIR]

Gradients are compared with dense fp64 ones of the same 16-bit inputs. A family that dies, hangs or
is wrong does not stop the others. --times compares with FlashAttention-3 where DIR holds
fa3_peer.py (by default the folder above this one), interleaved.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from keel import masks
from keel.kernels import flash_bwd, hopper_bwd_launch
from keel.key_records import key_records
from keel.masks import AttnMask, AttnMaskType, AttnSlice
from keel.meta import Scoring

LOG2E = 1.4426950408889634
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 8e-4}
"""Of norms; rounding of p and ds gives half of it."""
FAMILY_SECONDS = 120
ENDS = [0, *itertools.accumulate([1, 3, 600, 5, 128, 256, 700, 17, 100, 315])]
PLAIN = {
    "full": [masks.full(128), masks.full(64, 256), masks.full(1024), masks.full(333, 77)],
    "causal": [masks.causal(1024), masks.causal(1000), masks.causal(1001), masks.causal(30)],
    "docs": [masks.documents(ENDS, causal=True)],
    "docsfull": [masks.documents(ENDS, causal=False)],
    "window": [masks.sliding_window(2125, left=300, right=5, sink_tokens=9)],
    "tiny": [masks.documents(range(0, 2125, 12), causal=True)],
    "nothing": [AttnMask([], 200, 300), AttnMask([], 1, 1)],
    "manytiles": [masks.documents(range(0, 9001, 45), causal=True)],
}


class Problem:
    """Inputs, row terms and right gradients of one call."""

    def __init__(self, mask, hq, hk, d, dv=None, dtype=torch.bfloat16, seed=0, sink=False):
        torch.manual_seed(seed)
        dv = d if dv is None else dv
        make = lambda t, h, n: torch.randn(t, h, n, device="cuda").to(dtype)  # noqa: E731
        self.mask, self.dtype = mask, dtype
        self.q, self.k = make(mask.tq, hq, d), make(mask.tk, hk, d)
        self.v, self.dout = make(mask.tk, hk, dv), make(mask.tq, hq, dv)
        self.scoring = Scoring(scale=d**-0.5)
        sinks = torch.randn(hq, device="cuda") if sink else [None] * hq
        group = hq // hk
        self.right = {n: torch.zeros_like(x, dtype=torch.float64) for n, x in self.named()}
        self.lse2 = torch.empty(hq, mask.tq, device="cuda")
        self.delta = torch.empty_like(self.lse2)
        self.dense = mask.to_dense().cuda()
        for h in range(hq):
            q, dout = self.q[:, h].double(), self.dout[:, h].double()
            k, v = self.k[:, h // group].double(), self.v[:, h // group].double()
            s = (q @ k.T * self.scoring.scale).masked_fill_(~self.dense, -math.inf)
            if sinks[h] is not None:
                s = torch.cat([s, sinks[h].double().expand(mask.tq, 1)], 1)
            lse = s.logsumexp(1)
            p = torch.exp(s - lse.nan_to_num(neginf=0.0)[:, None])[:, : mask.tk]
            delta = (dout * (p @ v)).sum(1)
            ds = p * (dout @ v.T - delta[:, None])
            self.right["dq"][:, h] = ds @ k * self.scoring.scale
            self.right["dk"][:, h // group] += ds.T @ q * self.scoring.scale
            self.right["dv"][:, h // group] += p.T @ dout
            self.lse2[h] = torch.where(lse == -math.inf, math.inf, lse * LOG2E)
            self.delta[h] = delta

    def named(self):
        return zip(("dq", "dk", "dv"), (self.q, self.k, self.v), strict=True)

    def gradients(self, out=None, **options):
        grads = {n: torch.full_like(x, math.nan, dtype=out) for n, x in self.named()}
        hopper_bwd_launch.backward(
            *(self.dout, self.q, self.k, self.v, self.lse2, self.delta, self.mask, self.scoring),
            **grads,
            **options,
        )
        torch.cuda.synchronize()
        return grads


def check(name: str, problem: Problem, **options) -> bool:
    """By norm of all, and of each row, so that few wrong rows are seen among many."""
    ours = problem.gradients(**options)
    tolerance = TOLERANCE[problem.dtype]
    nobody = ~problem.dense.any(0)  # exactly zero there
    unseen = {"dq": ~problem.dense.any(1), "dk": nobody, "dv": nobody}
    fine, words = True, []
    for n, x in ours.items():
        right = problem.right[n]
        rows, error = right.norm(dim=2), (x.double() - right).norm(dim=2)
        usual = rows.square().mean().sqrt() if rows.numel() else rows.sum()
        noise = 2e-5 * right.shape[2] ** 0.5
        whole = error.norm() <= tolerance * rows.norm() + noise * rows.numel() ** 0.5  # NaN is not
        each = (error <= 6 * tolerance * rows.clamp(min=usual) + 10 * noise).all()
        zeros = (x[unseen[n]] == 0).all()
        good = bool(whole and each and zeros)
        fine &= good
        verdict = "" if good else f" WRONG(whole {whole}, rows {each}, zeros {zeros})"
        words.append(f"{n} {(error.norm() / rows.norm().clamp(min=1e-30)).item():.1e}{verdict}")
    print(f"{'ok   ' if fine else 'WRONG'} {name:36s}", " | ".join(words), flush=True)
    if not fine:
        where(ours, problem.right)
    return fine


def where(ours: dict, right: dict) -> None:
    """Which parts are wrong: rows modulo 128 in quarters of 32, columns, heads, blocks of 128."""
    for n, x in ours.items():
        off = (x.double() - right[n]).nan_to_num(1e3).square()
        rows = torch.arange(len(x), device=x.device) % 128 // 32
        kinds = {
            "rows%128": [off[rows == i].mean() for i in range(4) if (rows == i).any()],
            "columns": [c.mean() for c in off.chunk(4, -1)],
            "heads": list(off.mean((0, 2)))[:8],
            "blocks": [b.mean() for b in off.split(128)][:20],
        }
        for label, numbers in kinds.items():
            shown = " ".join(f"{v.sqrt().item():.1e}" for v in numbers)
            print(f"      {n} {label:9s} {shown}", flush=True)


def random_mask(rng: random.Random, limit: int) -> AttnMask:
    tq, tk = (rng.randrange(1, limit) // 16 * 16 + rng.randrange(1, 18) for _ in range(2))
    slices = []
    for _ in range(rng.randrange(0, 7)):
        q0, k0 = rng.randrange(tq), rng.randrange(tk)
        q, k = (q0, rng.randrange(q0, tq + 1)), (k0, rng.randrange(k0, tk + 1))
        if rng.random() < 0.7:
            slices.append(AttnSlice.of_type(q, k, rng.choice(list(AttnMaskType))))
        else:
            lo = rng.randrange(-tq, tk)
            slices.append(AttnSlice(*q, *k, lo=lo, hi=lo + rng.randrange(0, 200)))
    return AttnMask(slices, tq, tk)


def plain(name: str, d: int):
    for mask in PLAIN[name]:
        heads = ((4, 2),) if name == "manytiles" else ((1, 1), (8, 2))
        for hq, hk in heads:
            label = f"{name} {mask.tq}x{mask.tk} d={d} {hq}:{hk}"
            yield check(label, Problem(mask, hq, hk, d), splits=1)


def layouts(d: int):
    """Parts of heads, strides of a fused projection, fp32 results, a sink."""
    problem = Problem(PLAIN["docs"][0], 8, 2, d)
    for splits in (2, 4, None):
        yield check(f"splits {splits} d={d}", problem, splits=splits)
    packed = torch.cat([problem.q, problem.k, problem.v], 1)
    problem.q, problem.k, problem.v = packed.split([8, 2, 2], 1)
    yield check(f"packed qkv d={d}", problem, splits=1)
    yield check(f"packed qkv, fp32 out d={d}", problem, splits=1, out=torch.float32)
    problem = Problem(PLAIN["causal"][1], 8, 2, d, dtype=torch.float16, sink=True)
    yield check(f"fp16 with a sink d={d}", problem)


def dims(d: int, dv: int):
    for splits in (1, 2):
        problem = Problem(PLAIN["causal"][2], 6, 3, d, dv)
        yield check(f"d={d} dv={dv} splits {splits}", problem, splits=splits)
    yield check(f"d={d} dv={dv} docs", Problem(PLAIN["docs"][0], 2, 2, d, dv), splits=1)


def randoms(d: int, dtype: torch.dtype, count: int):
    for seed in range(count):
        rng = random.Random(f"{d} {dtype} {seed}")
        hk, group = rng.choice([1, 2, 3]), rng.randrange(1, 9)
        mask = random_mask(rng, rng.choice([64, 300, 700, 1500]))
        problem = Problem(mask, hk * group, hk, d, None, dtype, seed, sink=rng.random() < 0.2)
        splits = rng.choice([None, 1, group])
        yield check(f"random {seed} {mask.tq}x{mask.tk} splits {splits}", problem, splits=splits)


def repeat(d: int):
    problem = Problem(PLAIN["docs"][0], 8, 2, d)
    first = problem.gradients(splits=1)
    same = 0
    for _ in range(50):
        again = problem.gradients(splits=1)
        same += all(torch.equal(first[n], again[n]) for n in ("dk", "dv"))
    print(f"dk and dv the same in {same} of 50 repetitions", flush=True)
    yield same == 50


def families(count: int) -> dict:
    """Name -> what yields whether each check was right; those that take long first."""
    both = (("bf16", torch.bfloat16), ("fp16", torch.float16))
    made = {}
    for d in (128, 64):
        for short, dtype in both:
            made[f"random-{d}-{short}"] = lambda d=d, t=dtype: randoms(d, t, count)
        made[f"layouts-{d}"] = lambda d=d: layouts(d)
        for name in PLAIN:
            made[f"{name}-{d}"] = lambda d=d, n=name: plain(n, d)
        made[f"repeat-{d}"] = lambda d=d: repeat(d)
    for d, dv in ((96, 96), (40, 40), (128, 64), (64, 128)):
        made[f"dims-{d}-{dv}"] = lambda d=d, dv=dv: dims(d, dv)
    return made


def run_here(names: list[str], count: int) -> int:
    wrong = 0
    for name in names:
        results = list(families(count)[name]())
        wrong += results.count(False)
        print(f"{name}: {results.count(True)} of {len(results)} right", flush=True)
    return wrong


def run_apart(names: list[str], count: int, side_by_side: int) -> int:
    """One line for each family, and of one that is not right also the last lines it said."""
    says = threading.Lock()

    def one(name: str) -> bool:
        began = time.monotonic()
        command = [sys.executable, __file__, "--only", name, "--masks", str(count)]
        ended = "0"
        try:
            run = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=FAMILY_SECONDS,
                check=False,
            )
            said, ended = run.stdout, str(run.returncode)
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode(errors="replace")
            ended = "HANGS"
        lines = [x for x in said.splitlines() if "keel compiled" not in x and x.strip()]
        summary = lines[-1] if ended == "0" and lines else f"ended with {ended}"
        with says:
            took = time.monotonic() - began
            print(f"{'ok   ' if ended == '0' else 'WRONG'} {took:4.0f} s  {name:18s} {summary}")
            if ended != "0":
                wrong = [n for n, x in enumerate(lines) if x.startswith("WRONG")]
                said_ok = [x for x in lines if x.startswith("ok")][-1:]
                errors = [x for x in lines if "rror" in x and not x.startswith(" ")][:3]
                shown = lines[wrong[0] : wrong[0] + 14] if wrong else said_ok + errors + lines[-2:]
                print("\n".join("        " + x[:220] for x in shown))
            sys.stdout.flush()
        return ended == "0"

    with ThreadPoolExecutor(side_by_side) as pool:
        results = list(pool.map(one, names))
    print(f"{results.count(True)} of {len(results)} families right", flush=True)
    return results.count(False)


# Times


def captured(function):
    """A replay of a CUDA graph of one call, or the call itself where it cannot be captured."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay, ""
    except RuntimeError as problem:
        torch.cuda.synchronize()
        return function, f" (eager: {str(problem).splitlines()[0][:60]})"


def interleaved(calls: dict, rounds: int = 7) -> dict:
    """Median seconds of each; all take turns, so that clocks and heat are alike."""
    times: dict = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            begin.record()
            for _ in range(3):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / 3e3)
    return {name: statistics.median(x) for name, x in times.items()}


def document_ends(tokens: int) -> list[int]:
    rng = random.Random(7)
    ends = [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + rng.randrange(tokens // 32, tokens // 8)))
    return ends


def kernel_alone(given: tuple, splits: int | None):
    """Without filling and rounding dq, and without adding up parts."""
    dout, q, k, v, lse2, delta, mask, scoring = given
    hq, hk, d = q.shape[1], k.shape[1], q.shape[2]
    by_keys = key_records(mask, 64 * 128 // d)
    if splits is None:
        sms = hopper_bwd_launch.num_sms(q.device)
        splits = hopper_bwd_launch.choose_splits(by_keys.tile_work, hk, hq // hk, sms)
    dq32 = torch.zeros(q.shape, device="cuda")
    dk, dv = (hopper_bwd_launch._room_for(torch.empty_like(x), splits) for x in (k, v))
    rest = (mask, by_keys.records, scoring.scale, splits, dq32, dk, dv)
    return splits, lambda: hopper_bwd_launch._launch(dout, q, k, v, lse2, delta, *rest)


def time_mask(label, mask, hq, hk, d, peer, ends, causal, window, all_splits) -> None:
    torch.manual_seed(0)
    make = lambda h: torch.randn(mask.tq, h, d, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v, dout = make(hq), make(hk), make(hk), make(hq)
    scoring = Scoring(scale=d**-0.5)
    calls, notes, theirs = {}, "", None
    if peer is None:
        from keel.kernels import flash_fwd

        out, lse = torch.empty_like(q), torch.empty(mask.tq, hq, device="cuda")
        flash_fwd.forward(q, k, v, mask, scoring, out=out, lse=lse)
    else:
        cu = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
        longest = None if cu is None else int(cu.diff().max())
        options = (cu, longest, causal, window)
        batch = [x if cu is not None else x[None] for x in (q, k, v)]
        their_out, their_lse = peer.fwd(*batch, *options)
        their_dout = dout if cu is not None else dout[None]

        def fa3():
            return peer.bwd(their_dout, *batch, their_out, their_lse, *options)

        theirs = [x.reshape(y.shape) for x, y in zip(fa3(), (q, k, v), strict=True)]
        calls["fa3"], notes = captured(fa3)
        out = their_out.reshape(q.shape)
        lse = their_lse.reshape(hq, mask.tq).T.contiguous()
    grads = {n: torch.empty_like(x) for n, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)}

    def ours(splits=None):
        lse2, delta = flash_bwd.row_terms(out, dout, lse, None)
        given = (dout, q, k, v, lse2, delta, mask, scoring)
        hopper_bwd_launch.backward(*given, **grads, splits=splits)

    ours()
    apart = ""
    if theirs is not None:  # both are 16-bit: apart by rounding
        far = [
            ((x.float() - y.float()).norm() / y.float().norm()).item()
            for x, y in zip(grads.values(), theirs, strict=True)
        ]
        apart = f" | apart {max(far):.1e}{'' if max(far) < 1e-2 else ' WRONG'}"
    lse2, delta = flash_bwd.row_terms(out, dout, lse, None)
    chosen, alone = kernel_alone((dout, q, k, v, lse2, delta, mask, scoring), None)
    if notes:
        calls["ours"], calls["kernel"] = ours, alone
    else:
        calls["ours"], calls["kernel"] = captured(ours)[0], captured(alone)[0]
    for n in (n for n in (1, 2, 4, 8) if all_splits and hq // hk % n == 0):
        calls[f"splits {n}"] = captured(lambda n=n: ours(n))[0]
    times = interleaved(calls)
    flops = 10 * mask.area() * hq * d
    words = [f"{name} {flops / t / 1e12:4.0f}" for name, t in times.items()]
    ratio = f"{times['fa3'] / times['ours']:.2f}x fa3 | " if "fa3" in times else ""
    line = f"{ratio}{times['ours'] * 1e6:6.0f} us, parts {chosen}{apart}{notes}"
    print(f"{label:24s} TFLOP/s ", " | ".join(words), "|", line, flush=True)


def time_all(peers: Path, seconds: float) -> None:
    peer = None
    if (peers / "fa3_peer.py").exists():
        sys.path.append(str(peers))
        from fa3_peer import load

        peer = load(str(peers))
    else:
        print(f"no fa3_peer.py in {peers}: without FlashAttention-3")
    began = time.monotonic()
    for hq, hk, d in ((64, 8, 128), (32, 32, 64)):
        for tokens in (4096, 8192, 16384):
            ends = document_ends(tokens)
            for name, mask, cu, causal, window in (
                ("full", masks.full(tokens), None, False, -1),
                ("causal", masks.causal(tokens), None, True, -1),
                ("vfull", masks.documents(ends, causal=False), ends, False, -1),
                ("vcausal", masks.documents(ends, causal=True), ends, True, -1),
                ("swa", masks.sliding_window(tokens, left=1024), None, False, 1024),
            ):
                if time.monotonic() - began > seconds:
                    print(f"stopped after {seconds} s")
                    return
                label = f"d={d} {hq}:{hk} {tokens} {name}"
                try:
                    every = tokens == 4096 and hq > hk
                    time_mask(label, mask, hq, hk, d, peer, cu, causal, window, every)
                except torch.cuda.OutOfMemoryError as problem:
                    print(label, "out of memory:", str(problem)[:80])
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", help="families, in this process")
    parser.add_argument("--masks", type=int, default=40, help="random ones, for each of 4 families")
    parser.add_argument("--side-by-side", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--seconds", type=float, default=85, help="limit of --times")
    parser.add_argument("--peers", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    names = list(families(0))
    if options.list:
        print(*names)
    elif options.times:
        time_all(options.peers, options.seconds)
    elif options.only:
        raise SystemExit(min(1, run_here(options.only, options.masks)))
    else:
        raise SystemExit(min(1, run_apart(names, options.masks, options.side_by_side)))


if __name__ == "__main__":
    main()
