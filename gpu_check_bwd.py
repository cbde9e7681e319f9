"""Hopper backward on a GPU: right on many masks, then timed by CUDA-graph replay.

    PYTHONPATH=src python gpu_check_bwd.py [--quick] [--masks 60] [--no-times]

Every gradient is compared with the portable backward in fp32 on the same numbers; its error may be
twice that of the portable backward in the same dtype, and a little. A watchdog ends the process
when nothing happened for a minute (a kernel that hangs cannot be stopped otherwise).
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time

import torch

from keel import masks
from keel.kernels import flash_bwd, flash_fwd, hopper_bwd_launch
from keel.masks import AttnMask, AttnMaskType, AttnSlice
from keel.meta import Scoring

last_sign = [time.monotonic()]


def alive(*words: object) -> None:
    last_sign[0] = time.monotonic()
    if words:
        print(*words, flush=True)


def watch(seconds: float) -> None:
    while True:
        time.sleep(1)
        if time.monotonic() - last_sign[0] > seconds:
            print(f"HANGS: no sign of life for {seconds} s", flush=True)
            os._exit(3)


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


class Problem:
    def __init__(self, mask, hq, hk, d, dv=None, dtype=torch.bfloat16, seed=0, sink=False):
        torch.manual_seed(seed)
        dv = d if dv is None else dv
        make = lambda t, h, n: torch.randn(t, h, n, device="cuda").to(dtype)  # noqa: E731
        self.mask = mask
        self.q, self.k = make(mask.tq, hq, d), make(mask.tk, hk, d)
        self.v, self.dout = make(mask.tk, hk, dv), make(mask.tq, hq, dv)
        self.scoring = Scoring(scale=d**-0.5, sink=torch.randn(hq, device="cuda") if sink else None)
        out = torch.empty(mask.tq, hq, dv, dtype=dtype, device="cuda")
        lse = torch.empty(mask.tq, hq, dtype=torch.float32, device="cuda")
        flash_fwd.forward(self.q, self.k, self.v, mask, self.scoring, out=out, lse=lse)
        self.lse2, self.delta = flash_bwd.row_terms(out, self.dout, lse, None)

    def gradients(self, how, dtype=None, out=None, **options):
        tensors = (self.dout, self.q, self.k, self.v)
        if dtype is not None:
            tensors = tuple(x.to(dtype) for x in tensors)
        grads = {
            n: torch.full_like(x, float("nan"), dtype=out)
            for n, x in zip(("dq", "dk", "dv"), tensors[1:], strict=True)
        }
        how(*tensors, self.lse2, self.delta, self.mask, self.scoring, **grads, **options)
        torch.cuda.synchronize()
        alive()
        return grads


def check(name: str, problem: Problem, **options) -> bool:
    right = problem.gradients(flash_bwd.backward, torch.float32)
    portable = problem.gradients(flash_bwd.backward)
    ours = problem.gradients(hopper_bwd_launch.backward, **options)
    dense = problem.mask.to_dense().to(problem.q.device)
    nobody = ~dense.any(0)  # exactly zero there
    unseen = {"dq": ~dense.any(1), "dk": nobody, "dv": nobody}
    fine = True
    words = []
    for n, x in ours.items():
        norm = right[n].norm().item()
        error = (x.float() - right[n]).norm().item()
        allowed = 2 * (portable[n].float() - right[n]).norm().item() + 1e-4 * norm + 1e-6
        worst = (x.float() - right[n]).abs().max().item() if x.numel() else 0.0
        good = error <= allowed  # NaN is not
        good &= bool((x[unseen[n]] == 0).all())
        fine &= good
        verdict = "" if good else " WRONG"
        words.append(f"{n} {error / max(norm, 1e-30):.2e} max {worst:.1e}{verdict}")
    if not fine or not name.startswith("random"):
        alive(f"{'ok   ' if fine else 'WRONG'} {name:40s}", " | ".join(words))
    if not fine:
        where(ours, right)
    return fine


def where(ours: dict, right: dict) -> None:
    """Which parts are wrong: rows modulo 128 in quarters of 32, columns in quarters, heads."""
    for n, x in ours.items():
        off = (x.float() - right[n]).nan_to_num(1e3).square()
        rows = torch.arange(len(x), device=x.device) % 128 // 32
        by_row = [off[rows == i].mean().sqrt().item() for i in range(4) if (rows == i).any()]
        by_column = [c.mean().sqrt().item() for c in off.chunk(4, -1)]
        by_head = off.mean((0, 2)).sqrt().tolist()[:8]
        by_block = [b.mean().sqrt().item() for b in off.split(128)][:8]
        finite = x.isfinite().float().mean().item()
        for label, numbers in (
            *(("rows%128", by_row), ("columns", by_column)),
            *(("heads", by_head), ("blocks", by_block)),
        ):
            shown = " ".join(f"{v:.1e}" for v in numbers)
            alive(f"      {n} {label:9s} {shown}, finite {finite:.3f}")


def check_all(num_random: int, quick: bool) -> int:
    wrong = 0
    lengths = [1, 3, 600, 5, 128, 256, 700, 17, 100, 315]
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    plain = {
        "full 128": masks.full(128),
        "full 64 x 256": masks.full(64, 256),
        "full 1024": masks.full(1024),
        "causal 1024": masks.causal(1024),
        "causal 1000": masks.causal(1000),
        "documents causal": masks.documents(ends, causal=True),
        "documents full": masks.documents(ends, causal=False),
        "window": masks.sliding_window(2125, left=300, right=5, sink_tokens=9),
        "tiny documents": masks.documents(range(0, 2125, 12), causal=True),
        "nothing": AttnMask([], 200, 300),
    }
    for d in (128, 64):
        for name, mask in plain.items():
            for hq, hk in ((1, 1), (8, 2)):
                wrong += not check(f"{name} d={d} {hq}:{hk}", Problem(mask, hq, hk, d), splits=1)
            if wrong and quick:
                return wrong
        for splits in (2, 4):
            problem = Problem(plain["documents causal"], 8, 2, d)
            wrong += not check(f"splits {splits} d={d}", problem, splits=splits)
        problem = Problem(plain["documents causal"], 8, 2, d)
        packed = torch.cat([problem.q, problem.k, problem.v], 1)  # strided, as from one projection
        problem.q, problem.k, problem.v = packed.split([8, 2, 2], 1)
        wrong += not check(f"packed qkv d={d}", problem, splits=1)
        wrong += not check(f"packed qkv, fp32 out d={d}", problem, splits=1, out=torch.float32)
        problem = Problem(plain["causal 1000"], 8, 2, d, dtype=torch.float16, sink=True)
        wrong += not check(f"fp16 with a sink d={d}", problem)
    for d, dv in ((96, 96), (40, 40), (128, 64), (64, 128)):
        problem = Problem(plain["causal 1000"], 6, 3, d, dv)
        for splits in (1, 2):
            wrong += not check(f"d={d} dv={dv} splits {splits}", problem, splits=splits)
    bad = 0
    for seed in range(num_random):
        rng = random.Random(seed)
        hk = rng.choice([1, 2, 3])
        group = rng.randrange(1, 9)
        problem = Problem(
            *(random_mask(rng, rng.choice([64, 300, 700, 1500])), hk * group, hk),
            d=rng.choice([64, 128]),
            dtype=rng.choice([torch.bfloat16, torch.float16]),
            seed=seed,
            sink=rng.random() < 0.2,
        )
        splits = rng.choice([None, 1, group])
        bad += not check(f"random {seed} splits {splits}", problem, splits=splits)
    alive(f"random masks: {num_random - bad} of {num_random} right")
    problem = Problem(masks.documents(ends, causal=True), 8, 2, 128)
    first = problem.gradients(hopper_bwd_launch.backward, splits=1)
    same = 0
    for _ in range(20):
        again = problem.gradients(hopper_bwd_launch.backward, splits=1)
        same += all(torch.equal(first[n], again[n]) for n in ("dk", "dv"))
    alive(f"dk and dv the same in {same} of 20 repetitions (must be all)")
    return wrong + bad + (same < 20)


def replay_time(function, repeats=10) -> float:
    """Seconds of one call, by replay of a CUDA graph."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            function()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 4e3)
        alive()
    return sorted(times)[len(times) // 2]


def document_ends(tokens: int) -> list[int]:
    rng = random.Random(7)
    ends = [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + rng.randrange(tokens // 32, tokens // 8)))
    return ends


def time_mask(label: str, mask: AttnMask, hq: int, hk: int, d: int) -> None:
    problem = Problem(mask, hq, hk, d)
    flops = 10 * mask.area() * hq * d
    given = (problem.dout, problem.q, problem.k, problem.v, problem.lse2)
    given += (problem.delta, mask, problem.scoring)
    grads = {n: torch.empty_like(x) for n, x in zip(("dq", "dk", "dv"), given[1:4], strict=True)}

    def time_of(how, **options) -> float:
        return replay_time(lambda: how(*given, **grads, **options))

    times = {n: time_of(hopper_bwd_launch.backward, splits=n) for n in (None, 1, 2, 8)}
    portable = time_of(flash_bwd.backward)
    words = [f"splits {n}: {flops / seconds / 1e12:4.0f}" for n, seconds in times.items()]
    words.append(f"portable: {flops / portable / 1e12:4.0f}")
    words.append(f"{min(times.values()) * 1e6:6.0f} us, {portable / min(times.values()):.2f}x")
    alive(f"{label:22s} TFLOP/s ", " | ".join(words))


def time_all() -> None:
    for d in (128, 64):
        for tokens in (2048, 8192, 16384):
            ends = document_ends(tokens)
            for name, mask in {
                "full": masks.full(tokens),
                "causal": masks.causal(tokens),
                "vfull": masks.documents(ends, causal=False),
                "vcausal": masks.documents(ends, causal=True),
                "swa": masks.sliding_window(tokens, left=1024),
            }.items():
                time_mask(f"d={d} {tokens:6d} {name}", mask, 64, 8, d)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="stop at the first wrong mask")
    parser.add_argument("--masks", type=int, default=60, help="random ones")
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    threading.Thread(target=watch, args=(90,), daemon=True).start()
    wrong = check_all(options.masks, options.quick)
    alive(f"{wrong} wrong")
    if not options.no_times and (wrong == 0 or not options.quick):
        time_all()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
