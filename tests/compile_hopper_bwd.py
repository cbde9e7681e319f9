"""Compiles the Hopper backward without a GPU, and reads registers, spills, loops and copies.

python tests/compile_hopper_bwd.py few|near|all [part [dtype]]    (--help tells more)
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import triton
from compile_kernels import loops_of, resources, spills_of
from hopper_forms import (
    LARGEST_WITH_FP32_BIAS,
    BackwardForms,
    Variant,
    backward_forms,
    command_line,
    part_of,
)
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from keel._versions import sparing_ptxas
from keel.kernels import hopper_bwd, hopper_bwd_dq, hopper_bwd_wide
from keel.kernels.hopper_bwd_launch import compile_options
from keel.kernels.hopper_forms import BackwardForm, QueryForm, WideForm

FEW: list[tuple[BackwardForms, str]] = [
    (BackwardForm(128, 64, 128, 128), "bf16"),
    (BackwardForm(64, 128, 64, 64), "bf16"),
    (BackwardForm(128, 64, 128, 128, staged=False), "bf16"),
    (BackwardForm(128, 64, 128, 128, staged=False, persistent=True, together=True), "bf16"),
    (BackwardForm(128, 64, 128, 128, with_dq=False), "bf16"),
    (BackwardForm(128, 64, 128, 128, staged=False, has_softcap=True), "bf16"),
    (BackwardForm(128, 64, 128, 128, together=True), "bf16"),
    (WideForm(256, 256, 256, 256), "bf16"),
    (WideForm(256, 128, 192, 128, persistent=True, has_softcap=True), "fp16"),
    (QueryForm(128, 128, 128, 128), "bf16"),
    (QueryForm(64, 64, 64, 64, stages=3, v_stages=3), "fp16"),
    (QueryForm(256, 256, 64, 256, v_stages=1), "bf16"),
    (QueryForm(256, 256, 64, 192, v_stages=1, persistent=True, has_softcap=True), "fp16"),
    (
        BackwardForm(
            *(128, 64, 128, 128),
            **{"staged": False, "with_dq": False, "has_softcap": True, "has_bias": True},
        ),
        "bf16",
    ),
    (BackwardForm(64, 128, 64, 64, with_dq=False, has_alibi=True, has_offset=True), "bf16"),
    (WideForm(256, 256, 256, 256, has_bias=True), "fp16"),
    (
        QueryForm(
            *(256, 256, 64, 256),
            **{"v_stages": 1, "persistent": True, "has_bias": True, "want_dbias": True},
        ),
        "bf16",
    ),
    (
        QueryForm(
            *(256, 128, 64, 192),
            **{"v_stages": 1, "staged": False, "persistent": True},
            **{"has_bias": True, "want_dbias": True},
        ),
        "bf16",
    ),
    (QueryForm(128, 128, 64, 128, stages=3, v_stages=3, has_softcap=True, has_alibi=True), "bf16"),
    (
        BackwardForm(
            *(128, 64, 128, 128),
            **{"staged": False, "persistent": True, "with_dq": False},
            **{"has_softcap": True, "has_alibi": True},
        ),
        "bf16",
    ),
    (
        BackwardForm(
            *(64, 128, 64, 64),
            **{"staged": False, "persistent": True, "with_dq": False},
            **{"has_softcap": True, "has_bias": True},
        ),
        "bf16",
    ),
    (
        BackwardForm(
            *(64, 128, 64, 64),
            **{"staged": False, "persistent": True, "with_dq": False},
            **{"has_softcap": True, "has_alibi": True},
        ),
        "bf16",
    ),
]
NEAR = [FEW[i] for i in (0, 1, 2, 5, 6, 9, 13, 17, 19, 20, 21)]
"""Of those that have spilled with some Triton, one of each kind."""
ROWS = {"LSE2", "DELTA", "SLOPES", "DBIAS"}
OPTIONAL = {
    "has_bias": {"BIAS", "stride_bh", "stride_bi"},
    "has_alibi": {"SLOPES"},
    "has_offset": {"OFFSET"},
    "want_dbias": {"DBIAS", "stride_dbh", "stride_dbi"},
}
"""Arguments that only forms with these flags have."""


def signature(kernel: Any, variant: Variant) -> tuple[dict[str, str], dict, dict]:
    """(types, constants, alignments) of a call with contiguous tensors."""
    form, dtype, bias, match = variant
    if isinstance(form, QueryForm):
        boxes = {"Q": 64, "DO": 64, "K": form.bn, "V": form.bn}
        outs, absent = {"DQ": 64}, set()
    else:
        boxes = {"Q": form.bm, "DO": form.bm, "K": 64, "V": 64}
        outs, absent = {"DK": 64, "DV": 64}, set()
        if not form.with_dq:
            absent.add("DQ32")
    if form.staged:
        boxes |= outs
    else:
        absent |= outs.keys()
    for flag, names in OPTIONAL.items():
        if not getattr(form, flag, False):
            absent |= names
    if not (form.has_bias or form.has_alibi):
        absent.add("tk")
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    aligned = {}
    for index, name in enumerate(kernel.arg_names):
        if name == "FORM" or name in absent:
            types[name], constants[(index,)] = "constexpr", form if name == "FORM" else None
        elif name in boxes:
            block = [boxes[name], 1, form.dv if name in ("V", "DO", "DV") else form.d]
            layout = gl.NVMMASharedLayout.get_default_for(block, element)
            types[name] = f"tensordesc<{dtype}{block},{layout!r}>"
        elif name == "DQ32":
            layout = gl.NVMMASharedLayout.get_default_for([64, 1, 64], gl.float32)
            types[name] = f"tensordesc<fp32[64, 1, 64],{layout!r}>"
        elif name in ROWS:
            types[name] = "*fp32"
        elif name == "BIAS":
            types[name] = f"*{bias}"
        elif name.isupper():
            out = f"*{dtype}" if match else "*fp32"
            types[name] = out if name.endswith("_OUT") else "*i32"
        else:
            types[name] = "fp32" if name in ("scale", "softcap") else "i32"
        if types[name].startswith("*"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def as_variant(form: BackwardForms, dtype: str) -> Variant:
    """With fp16, a bias in fp32 where that may be. Results not sent by TMA are parts, in fp32."""
    largest = max(getattr(form, n, 0) for n in ("columns", "dk_columns"))
    bias = "fp32" if dtype == "fp16" and largest <= LARGEST_WITH_FP32_BIAS else dtype
    return Variant(form, dtype, bias, match=form.staged or isinstance(form, WideForm))


def compile_variant(variant: Variant) -> Any:
    form = variant.form
    kernel = hopper_bwd.hopper_bwd_kernel
    if isinstance(form, QueryForm):
        kernel = hopper_bwd_dq.hopper_bwd_dq_kernel
    elif isinstance(form, WideForm):
        kernel = hopper_bwd_wide.hopper_bwd_wide_kernel
    types, constants, aligned = signature(kernel, variant)
    source = GluonASTSource(kernel, types, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    if not isinstance(form, QueryForm):
        options |= compile_options(form)
    with sparing_ptxas() as more:
        return triton.compile(source, target=target, options=options | more)


def chain_of(ptx: str) -> list[str]:
    """Waiting for the launch before, letting the next one begin, and accesses of global memory, in
    the order of the code; of several in a row, one."""
    found = re.findall(r"griddepcontrol\.(\w+)|(ld|st|red|atom|cp)\S*\.(?:global|tensor)", ptx)
    steps = [control or "access" for control, _ in found]
    return [step for step, _ in itertools.groupby(steps)]


def main() -> None:
    parser = command_line(__doc__, "few", "near", "all")
    args = parser.parse_args()
    chosen = {"few": FEW, "near": NEAR}.get(args.which)
    if chosen is None:
        variants = list(backward_forms(args.dtype or "bf16"))
    elif args.dtype is None:
        variants = [as_variant(*x) for x in chosen]
    else:
        parser.error(f"{args.which} forms have a dtype each: {args.dtype} goes with all")
    for variant in part_of(list(dict.fromkeys(variants)), args.part):
        compiled = compile_variant(variant)
        line = {"form": type(variant.form).__name__} | dataclasses.asdict(variant.form)
        line |= {k: v for k, v in variant._asdict().items() if k != "form"}
        line["triton"] = triton.__version__
        line |= resources(compiled)
        loops = loops_of(compiled)
        line |= {"loops": sorted(map(len, loops)), "loop_spills": spills_of(loops)}
        line["chain"] = chain_of(compiled.asm["ptx"])
        line["copies"] = sorted(set(re.findall(r"bulk\.tensor\.(\dd)\.", compiled.asm["ptx"])))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
