"""One call of Keel and of a peer for each cell, for a profiler to look at; it measures nothing.

    ncu --profile-from-start off python benchmarks/one_call.py --fa3 DIR forward:full:8192:16:16:256

`profile_table.py` says what else to give ncu, and makes a table of what it prints. Cells are
pass:mask:tokens:query heads:key heads:head dim. Each is computed once before the profiler starts,
so that nothing is compiled below it, and compared: who is compared is right. With --peer
keel-plain, what max logits cost.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from attention_bench import Case, prepare_call
from attention_masks import DIRECTIONS, MASKS
from attention_peers import ON_CPU, PEERS, default_folder, maker, why_absent, why_not
from exact import TOLERANCE, worst_error
from timing import machine


def cell(text: str) -> tuple[str, Case]:
    """A pass and a case."""
    direction, mask, *numbers = text.split(":") if ":" in text else (text, "")
    counted = len(numbers) == 4 and all(number.isdecimal() and int(number) for number in numbers)
    if direction not in DIRECTIONS or mask not in MASKS or not counted:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not pass:mask:tokens:hq:hk:d, with a pass of {', '.join(DIRECTIONS)} and "
            f"a mask of {', '.join(MASKS)}, as in forward:causal:8192:64:8:128"
        )
    tokens, *shape = (int(number) for number in numbers)
    return direction, Case(MASKS[mask](tokens), *shape)


def profile(direction: str, case: Case, peer: str, folder: Path | None) -> None:
    """Both compute once, are compared, and compute again while the profiler looks."""
    reason = why_not(peer, case.problem) or why_absent(peer, folder)
    if reason is not None:
        raise SystemExit(f"{peer} cannot do {case}: {reason}")
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    qkv, dout = case.tensors(device, dtype)
    calls = [
        prepare_call(direction, maker(name, folder)(case.problem), qkv, dout)
        for name in ("keel", peer)
    ]
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (call() for call in calls))
    if not (error := worst_error(ours, theirs)) < TOLERANCE:
        raise SystemExit(f"{direction} of {case}: keel and {peer} differ by {error:.2g}")
    with torch.cuda.profiler.profile() if on_gpu else contextlib.nullcontext():
        for call in calls:
            call()
    if on_gpu:
        torch.cuda.synchronize()
    print(f"{direction} of {case}: keel, then {peer}; they differ by {error:.2g}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="+", type=cell, metavar="pass:mask:tokens:hq:hk:d")
    usual = "fa3" if torch.cuda.is_available() else ON_CPU[0]
    parser.add_argument("--peer", choices=(*PEERS, "keel-plain"), default=usual)
    parser.add_argument("--fa3", type=Path, default=default_folder(), help="folder of fa3_peer.py")
    args = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, triton {machine()[1]}")
    for direction, case in args.cells:
        profile(direction, case, args.peer, args.fa3)


if __name__ == "__main__":
    main()
