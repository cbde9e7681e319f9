"""Kernels compile for GPUs that are not here, fit their memory, and do not spill."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keel._versions import wastes_registers

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = {80: 166_912, 86: 101_376, 90: 232_448}


@functools.cache
def compiled(*command: str) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("arch", sorted(SHARED_LIMIT))
def test_kernels_compile_and_fit(arch):
    everything = compiled("compile_kernels.py", str(arch))
    variants = [v for v in everything if v["kernel"].startswith("flash")]
    assert {v["kernel"] for v in variants} == {
        "flash_fwd_kernel",
        "flash_bwd_dkdv_kernel",
        "flash_bwd_dq_kernel",
    }
    assert {v["d"] for v in variants} == {64, 128, 192, 256}
    too_big = [v for v in variants if v["shared"] > SHARED_LIMIT[arch]]
    assert not too_big, too_big
    common = [v for v in variants if not {"HAS_BIAS", "HAS_SOFTCAP", "HAS_ALIBI"} & {*v["flags"]}]
    assert len(common) >= 12
    spilling = [v for v in common if v["loop_spills"]]
    assert not spilling, spilling
    softmax = [v for v in everything if v["kernel"].startswith("softmax")]
    assert {v["kernel"] for v in softmax} == {"softmax_fwd_kernel", "softmax_bwd_kernel"}
    assert not [v for v in softmax if v["STACK"] or v["LOCAL"]]
    gram = [v for v in everything if v["kernel"] == "symmetric_product_kernel"]
    assert len(gram) == 4 and max(v["shared"] for v in gram) <= SHARED_LIMIT[arch]
    assert not [v for v in gram if v["STACK"] or v["LOCAL"]]
    traffic = [v for v in everything if v["kernel"] == "traffic_kernel"]
    assert {v["cluster"] for v in traffic} == ({1, 2, 4} if arch == 90 else {1})
    for v in traffic:  # one to an SM, and none beside attention's registers
        assert 64 < v["REG"] <= 128 and not v["STACK"]
    observed = [v for v in everything if v["kernel"] == "observed_fwd_kernel"]
    assert len(observed) == 2 and not [v for v in observed if v["loop_spills"]]
    assert {"mark_kernel", "wait_kernel"} <= {v["kernel"] for v in everything}
    of_clip = ("qk_max_kernel", "row_scale_kernel", "clip_heads_kernel")
    clip = [v for v in everything if v["kernel"] in of_clip]
    assert len(clip) == 7 and {v["d"] for v in clip} == {None, 64, 128, 192, 256}
    assert not [
        v for v in clip if v["LOCAL"] or v["loop_spills"] or v["shared"] > SHARED_LIMIT[arch]
    ]


def spilling(variants: list[dict]) -> list[dict]:
    """Those of the Hopper kernels that keep anything on the stack, in loops or outside of them."""
    return [v for v in variants if v["STACK"]]


@pytest.mark.parametrize("part", ["0/2", "1/2"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_forms_near_the_limit(which, part):
    """A choice of the forms below, for other versions of Triton (`make spills`)."""
    command = {"forward": "compile_hopper.py", "backward": "compile_hopper_bwd.py"}[which]
    variants = compiled(command, "near", part)
    assert len(variants) >= 2
    assert not spilling(variants)


@pytest.mark.parametrize("which", ["whole", "others"])
def test_hopper_kernels_do_not_spill(which):
    variants = compiled("compile_hopper.py", which)
    assert {(v["d"], v["bn"]) for v in variants} >= {(64, 128), (128, 64), (128, 128), (256, 64)}
    if which == "whole":
        three = {v["bn"] for v in variants if v["consumers"] == 3}
        assert three == (set() if wastes_registers() else {64, 128})
    else:
        assert {v["pack"] for v in variants if v["cuts"]} >= {1, 4, 8, 16, 64}
        assert {v["d"] for v in variants if v["paired"]} == {64, 128, 192, 256}
    for v in variants:
        assert v["shared"] <= SHARED_LIMIT[90], v
        assert not v["fences"], v
        assert (v["votes"] > 0) == v["lazy"], v
    assert {v["lazy"] for v in variants} == {True, False}
    assert not spilling(variants)


def test_hopper_backward_does_not_spill():
    variants = compiled("compile_hopper_bwd.py", "few")
    assert {(v["form"], v["d"]) for v in variants} == {
        *itertools.product(("BackwardForm", "QueryForm"), (64, 128)),
        *itertools.product(("WideForm", "QueryForm"), (256,)),
    }
    added = ("has_bias", "has_alibi", "has_offset", "want_dbias")
    for option in ("staged", "persistent", "with_dq", "has_softcap", *added):
        assert {v[option] for v in variants if option in v} == {True, False}
    for v in variants:
        assert v["shared"] <= SHARED_LIMIT[90], v
        # two consumers, with masks and without; of wide heads one alone knows of masks
        assert len(v["loops"]) == (3 if v["form"] == "WideForm" else 4), v
        # TMA begins at multiples of 16 bytes in the last dimension: rows must not be that one
        assert v["copies"] == ["3d"], v
    assert not spilling(variants)


def test_kernels_that_racecheck_can_follow():
    """Here, since nobody would see on a machine without a GPU that they are not made any more."""
    found = {v["kernel"]: v["counts"] for v in compiled("compile_followed.py")}
    # TMA's; each lane of the producer; each thread of two consumers
    assert found.pop("forward") == [1, 32, 256]
    # each lane's numbers, and what TMA brings
    assert found == {name: [1, 33] for name in ("narrow", "wide", "offset")}


def test_order_of_early_launches():
    """As `early_launches` says: dk and dv touch nothing before the launch before is done, and let
    none begin before; dq waits once; blocks of threads that stay take no part."""
    for v in compiled("compile_hopper_bwd.py", "few"):
        chain = ["wait", "launch_dependents", "access"]
        if v["persistent"]:
            chain = ["access"]
        elif v["form"] == "QueryForm":
            chain = ["access", "wait", "access"]  # the code of other warps follows
        assert v["chain"] == chain, v
