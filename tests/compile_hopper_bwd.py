"""Compiles the Hopper backward without a GPU, and reads registers, spills, loops and copies.

python tests/compile_hopper_bwd.py
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import triton
from compile_kernels import loops_of, resources, spills_in_loops
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from keel.kernels import hopper_bwd
from keel.kernels.hopper_common import BackwardForm

FORMS = [
    BackwardForm(128, 64, 128, 128),
    BackwardForm(64, 128, 64, 64),
    BackwardForm(128, 64, 128, 128, staged=False),
    BackwardForm(64, 128, 64, 64, staged=False),
    BackwardForm(128, 64, 128, 128, persistent=True),
    BackwardForm(64, 128, 64, 64, persistent=True),
    BackwardForm(128, 64, 128, 128, staged=False, persistent=True),
    BackwardForm(64, 128, 64, 64, staged=False, persistent=True),
]
ROWS = {"LSE2", "DELTA"}


def signature(form: BackwardForm, dtype: str) -> tuple[dict[str, str], dict, dict]:
    """(types, constants, alignments) of a call with contiguous tensors."""
    boxes = {"Q": form.bm, "DO": form.bm, "K": 64, "V": 64}
    if form.staged:
        boxes |= {"DK": 64, "DV": 64}
    absent = {"DK", "DV"} - boxes.keys()
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    aligned = {}
    for index, name in enumerate(hopper_bwd.hopper_bwd_kernel.arg_names):
        if name == "FORM" or name in absent:
            types[name], constants[(index,)] = "constexpr", form if name == "FORM" else None
        elif name in boxes:
            block = [boxes[name], 1, form.d]
            layout = gl.NVMMASharedLayout.get_default_for(block, element)
            types[name] = f"tensordesc<{dtype}{block},{layout!r}>"
        elif name == "DQ32":
            layout = gl.NVMMASharedLayout.get_default_for([64, 1, 64], gl.float32)
            types[name] = f"tensordesc<fp32[64, 1, 64],{layout!r}>"
        elif name in ROWS:
            types[name] = "*fp32"
        elif name.isupper():
            out = f"*{dtype}" if form.staged else "*fp32"
            types[name] = out if name.endswith("_OUT") else "*i32"
        else:
            types[name] = "fp32" if name == "scale" else "i32"
        if types[name].startswith("*") or name.startswith("stride"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def compile_form(form: BackwardForm, dtype: str = "bf16") -> Any:
    types, constants, aligned = signature(form, dtype)
    source = GluonASTSource(
        hopper_bwd.hopper_bwd_kernel, types, constexprs=constants, attrs=aligned
    )
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": 4})


def main() -> None:
    for form, dtype in [*((form, "bf16") for form in FORMS), (FORMS[0], "fp16")]:
        compiled = compile_form(form, dtype)
        line = dataclasses.asdict(form) | {"dtype": dtype} | resources(compiled)
        loops = sorted(len(body) for body in loops_of(compiled))
        line |= {"loops": loops, "loop_spills": spills_in_loops(compiled)}
        line["copies"] = sorted(set(re.findall(r"bulk\.tensor\.(\dd)\.", compiled.asm["ptx"])))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
