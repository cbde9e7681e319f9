"""Launches past Triton's Python hand the driver what launches through it do, byte by byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
CALLS = ["triton forward", "triton sink", "hopper forward", "hopper sink", "hopper packed"]
CALLS += ["triton backward", "hopper backward", "hopper backward sm_margin"]
CALLS += ["hopper backward deterministic", "hopper wide backward softcap"]
EARLY = {
    "hopper backward": "011",
    "hopper backward sm_margin": "001",  # nothing may run on SMs that are left to others
    "hopper backward deterministic": "0111",
    "hopper wide backward softcap": "011",
}
"""Row terms, dk and dv, dq, sums: those that begin before the one before them is done."""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the fake driver has to be compiled")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver")
def test_the_driver_gets_the_same_bytes(tmp_path: Path) -> None:
    nvidia = pytest.importorskip("triton.backends.nvidia")
    pytest.importorskip("triton.experimental.gluon")
    include = Path(nvidia.__file__).parent / "include"
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-I{include}", "-o", library, str(TESTS / "fake_libcuda.c")],
        check=True,
    )
    (tmp_path / "libcuda.so").symlink_to(library)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, str(TESTS / "launch_without_gpu.py")],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [line["call"] for line in lines] == CALLS
    for line in lines:
        assert line["early"] == EARLY.get(line["call"], "0" * len(line["early"])), line
        pairs = line["call"] == "hopper sink"  # of the others, tiles are cut or heads packed
        assert line["clusters"] == ("2" if pairs else "1" * len(line["early"])), line
        assert line["same"] and line["bytes"] > 500, line
        assert line["encoded"] <= 6, line  # of results that came to lie elsewhere
