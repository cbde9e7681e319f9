"""Versions of Keel in turns: what a change to its kernels gains or costs.

    git worktree add /tmp/before HEAD~1
    python benchmarks/trees.py /tmp/before --masks full causal --lengths 1024 8192
    python benchmarks/trees.py /tmp/before /tmp/before --softcap 30 --dims 256   # and its own noise

This tree and those given, folders that hold src/keel, have a process each; one at a time works. In
each round each measures once, by CUDA graphs where there is a GPU, at clocks that have settled, and
the median of the ratios of a round counts. Results are not looked at here: that is what tests are
for.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attention_masks import DIRECTIONS, MASKS
from timing import Trial, capture, dims, heads, settled

HERE = Path(__file__).parents[1]
Cell = dict[str, Any]
"""Mask, tokens, heads, head dim, pass and options of one call, as JSON has it."""


class Tree:
    """One version, in a process of its own that answers a line with a line."""

    def __init__(self, folder: Path) -> None:
        source = folder.resolve() / "src"
        if not (source / "keel").is_dir():
            raise SystemExit(f"{folder} holds no src/keel: give the top folder of a checkout")
        environment = {**os.environ, "PYTHONPATH": str(source), "KEEL_TREE": str(source)}
        command = [sys.executable, __file__, "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, cell: Cell) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()

    def answer(self) -> float:
        """Milliseconds."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker has ended with {self.process.wait()}: see above")
        told = json.loads(line)
        if "problem" in told:
            raise SystemExit(told["problem"])
        return float(told["ms"])

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work() -> None:
    """Of a worker: measures what it is asked for."""
    import keel

    if not Path(keel.__file__).is_relative_to(os.environ["KEEL_TREE"]):
        problem = f"keel comes from {keel.__file__}, not from {os.environ['KEEL_TREE']}"
        print(json.dumps({"problem": problem}), flush=True)
        return
    last: Cell = {}
    for line in sys.stdin:
        cell = json.loads(line)
        try:
            if cell != last:
                last, trial = cell, trial_of(cell)
            told: dict[str, Any] = {"ms": trial.sample()}
        except Exception as problem:
            told = {"problem": f"{cell}: {type(problem).__name__}: {problem}"}
        print(json.dumps(told), flush=True)


def trial_of(cell: Cell) -> Trial:
    from attention_bench import prepare_call

    import keel

    problem = MASKS[cell["mask"]](cell["tokens"])
    on_gpu = torch.cuda.is_available()
    kind = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    tokens, hq, hk, d, dv = (cell[name] for name in ("tokens", "hq", "hk", "d", "dv"))
    shapes = [(tokens, hq, d), (tokens, hk, d), (tokens, hk, dv), (tokens, hq, dv)]
    *qkv, dout = (torch.randn(*shape, **kind) for shape in shapes)

    def attend(q, k, v):
        options = {"return_max_logits": True, **cell["options"]}
        return keel.flex_flash_attn_func(q, k, v, problem.mask, **options)[0]

    def prepare():
        return prepare_call(cell["pass"], attend, qkv, dout)

    replay, inside = capture(prepare)[:2] if on_gpu else (prepare(), 1)
    return Trial(replay, inside, cell["sample_ms"], cell["lead_ms"])


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    options = {"softcap": args.softcap, "sm_margin": args.sm_margin}
    options = {name: value for name, value in options.items() if value}
    if args.deterministic:
        options["deterministic"] = True
    grid = itertools.product(args.passes, args.masks, args.lengths, args.heads, args.dims)
    for direction, mask, tokens, (hq, hk), (d, *other) in grid:
        cell = {"pass": direction, "mask": mask, "tokens": tokens, "hq": hq, "hk": hk, "d": d}
        times = {"sample_ms": args.sample_ms, "lead_ms": args.lead_ms}
        yield {**cell, "dv": (*other, d)[0], "options": options, **times}


def in_turns(trees: Sequence[Tree], cell: Cell, rounds: int) -> list[list[float]]:
    """Milliseconds of each tree in each round; who begins alternates."""
    for tree in trees:  # compiled, all at once
        tree.ask(cell)
    for tree in trees:
        tree.answer()
    found: list[list[float]] = [[] for _ in trees]
    for turn in range(rounds):
        order = range(len(trees)) if turn % 2 == 0 else reversed(range(len(trees)))
        for n in order:
            trees[n].ask(cell)
            found[n].append(trees[n].answer())
    return found


def gains(found: Sequence[Sequence[float]]) -> list[float]:
    """How much faster the first is than each of the others: medians over rounds."""
    first, *others = found
    rounds = [zip(first, other, strict=True) for other in others]
    return [statistics.median(its / mine for mine, its in pairs) for pairs in rounds]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("trees", nargs="*", type=Path, help="other checkouts")
    many = functools.partial(made.add_argument, nargs="+")
    many("--masks", choices=list(MASKS), metavar="MASK", default=["full", "causal"])
    many("--lengths", type=int, default=[1024, 8192])
    many("--dims", type=dims, default=[(128,)], help="64, or 192/128")
    many("--heads", type=heads, default=[(64, 8)], help="query:key heads")
    many("--passes", choices=DIRECTIONS, default=DIRECTIONS)
    made.add_argument("--softcap", type=float, default=0.0)
    made.add_argument("--sm-margin", type=int, default=0)
    made.add_argument("--deterministic", action="store_true")
    made.add_argument("--rounds", type=int, default=9)
    settled(made, "cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.worker:
        return work()
    if not args.trees:
        raise SystemExit("no other tree to compare with: give the folder of a checkout")
    if args.rounds < 1:
        raise SystemExit(f"--rounds must be at least 1, got {args.rounds}")
    trees = [Tree(folder) for folder in (HERE, *args.trees)]
    try:
        for cell in cells(args):
            found = in_turns(trees, cell, args.rounds)
            name = "{pass:8} {mask:11} {tokens:6} {hq}:{hk} d{d}/{dv}".format(**cell)
            times = " ".join(f"{statistics.median(x):9.4f}" for x in found)
            ratios = " ".join(f"{x:.3f}" for x in gains(found))
            print(f"{name}  ms {times}  this tree is faster by {ratios}", flush=True)
    finally:
        for tree in trees:
            tree.end()


if __name__ == "__main__":
    main()
