"""Device memory of the backward beyond its inputs and gradients: Keel beside its peers.

    python benchmarks/backward_memory.py
    python benchmarks/backward_memory.py --masks causal --lengths 65536 --heads 64:8 --peers cudnn

bf16. What lives before the backward (tensors, gradients of outputs, what the forward saved) and the
gradients themselves are left out: the peak of torch's allocator above both. `stated` is what
docs/design.md says of Keel, all in fp32: two numbers for each row, dq unless it has a kernel of its
own, and dk and dv for each part into which query heads that share keys are cut. Rows are added to
benchmarks/results/backward_memory.csv.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from attention_masks import MASKS, Problem
from attention_peers import PEERS, Attend, Missing, default_folder, maker, why_not
from timing import append_csv, heads, machine

import keel
from keel.kernels import hopper_bwd_launch
from keel.kernels.flash_common import num_sms
from keel.key_records import key_records
from keel.meta import Scoring

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20


@dataclass
class Row:
    """One line of the CSV; in MiB."""

    mask: str
    tokens: int
    hq: int
    hk: int
    d: int
    provider: str
    extra_mib: float
    stated_mib: float
    q_mib: float
    gpu: str = ""
    torch: str = torch.__version__
    triton: str = ""
    keel: str = keel.__version__


def stated_bytes(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool
) -> int:
    """Of Keel's Hopper backward."""
    (tq, hq, d), (tk, hk, dim_v) = q.shape, v.shape
    tile_keys, block_m = hopper_bwd_launch.tile_sizes(d, dim_v)
    work = key_records(problem.mask, block_m, tile_keys).tile_work
    splits = hopper_bwd_launch.choose_splits(work, hk, hq // hk, num_sms(q.device))
    apart = hopper_bwd_launch.dq_apart(
        *(problem.mask, q, v, hk, Scoring(scale=d**-0.5)), deterministic=deterministic, sm_margin=0
    )
    rows = 2 * tq * hq
    dq = 0 if apart else tq * hq * d
    parts = 0 if splits == 1 else tk * hk * splits * (d + dim_v)
    return 4 * (rows + dq + parts)


def extra_bytes(attend: Attend, qkv: Sequence[torch.Tensor], dout: torch.Tensor) -> int:
    """Of the second backward: the first one compiles, and makes what is kept."""
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attend(*leaves)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, leaves, dout)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in grads)
        del out, grads
    return extra


def deterministic_keel(problem: Problem) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return keel.flex_flash_attn_func(q, k, v, problem.mask, deterministic=True)[0]

    return attend


def measure(
    problem: Problem,
    hq: int,
    hk: int,
    d: int,
    makers: dict[str, Callable[[Problem], Attend]],
) -> list[Row]:
    torch.manual_seed(0)
    qkv = [
        torch.randn(problem.tokens, h, d, device="cuda", dtype=torch.bfloat16) for h in (hq, hk, hk)
    ]
    dout = torch.randn(problem.tokens, hq, d, device="cuda", dtype=torch.bfloat16)
    gpu, triton = machine()
    rows = []
    for name, make in makers.items():
        if name in PEERS and why_not(name, problem):
            continue
        stated = float("nan")
        if name not in PEERS:
            stated = stated_bytes(problem, *qkv, deterministic=name != "keel") / MIB
        extra = extra_bytes(make(problem), qkv, dout) / MIB
        rows.append(
            Row(
                *(problem.name, problem.tokens, hq, hk, d, name, extra, stated),
                *(qkv[0].nbytes / MIB, gpu),
                triton=triton,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["full", "causal", "vcausal"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--dims", nargs="+", type=int, default=[128])
    parser.add_argument("--heads", type=heads, default=(64, 8))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["fa3", "cudnn"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, and there is none here")
    makers = {"keel": maker("keel"), "keel deterministic": deterministic_keel}
    for name in given.peers:
        try:
            makers[name] = maker(name, default_folder())
        except (Missing, ImportError, OSError) as problem:
            print(f"{name} is missing: {problem}")
    hq, hk = given.heads
    for d, tokens, name in itertools.product(given.dims, given.lengths, given.masks):
        rows = measure(MASKS[name](tokens), hq, hk, d, makers)
        for row in rows:
            print(
                f"{row.mask:8} {row.tokens:6} d {row.d:3} {row.provider:18} "
                f"{row.extra_mib:8.1f} MiB, stated {row.stated_mib:8.1f}, q {row.q_mib:8.1f}",
                flush=True,
            )
        append_csv(rows, given.out / "backward_memory.csv")


if __name__ == "__main__":
    main()
