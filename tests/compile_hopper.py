"""Compiles the Hopper kernels without a GPU, and reads registers and spills.

python tests/compile_hopper.py whole|others|near|all [part [dtype]]    (--help tells more)
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import triton
from compile_kernels import resources_and_spills
from hopper_forms import command_line, forward_forms, paced, part_of
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from keel._versions import copies_operands, sparing_ptxas, wastes_registers
from keel.kernels import hopper_fwd
from keel.kernels.hopper_forms import Form
from keel.kernels.hopper_launch import block_ns, check_compiled, choose_form, keeps_a_word

FLOATS = {"LSE", "MAX_LOGITS", "SINK", "PARTS"}
OF_CUTS = {"PARTS", "MEETINGS", "SHARES"}
OF_FACTORS = {f"{of}_{name}" for of in ("all", "section", "group") for name in ("factor", "shift")}


def forms(which: str) -> list[Form]:
    """Of whole tiles or of others: every head dim with each of its blocks; then the options, where
    registers are scarce. Or a few that have spilled with some Triton."""
    if which == "all":
        return list(dict.fromkeys(forward_forms()))
    if which == "others":
        return [*cuts(), *packed(), *pairs()]
    if which == "near":
        # spilled by itself with 3.8, and with 3.9 where results are added to what is there
        added = not wastes_registers()
        options = {"want_max": True, "has_softcap": True, "accumulate": added}
        wide = choose_form(256, 256, 64, out_matches=not added, **options)
        # had something on the stack outside of loops with 3.6
        options = {"out_matches": True, "want_max": True}
        met = choose_form(256, 256, 64, has_softcap=added, cuts=True, **options)
        sink = choose_form(128, 128, 128, has_sink=True, pack=8, **options)
        together = paced(choose_form(256, 256, 64, **options))
        # with 3.7
        capped = choose_form(128, 128, 64, out_matches=True, has_softcap=True, cuts=True)
        three = three_consumers()[1::2]
        # the first with 3.7, the others with 3.8, if they were staged there
        options = {"out_matches": True, "cuts": True, "pack": 16}
        capped_sink = {"has_softcap": True, "has_sink": True}
        sixteen = [
            choose_form(128, 128, 128, **options),
            *(choose_form(d, d, 64, **capped_sink, **options) for d in (128, 96)),
        ]
        # with 3.8 the first two of the packed ones
        return [wide, *three, cuts()[3], *packed()[1:4], met, sink, together, capped, *sixteen]
    plain = [
        choose_form(d, dv, bn, out_matches=True, want_max=True)
        for d, dv in ((64, 64), (128, 128), (64, 128), (192, 128), (256, 256), (64, 256))
        for bn in block_ns(d, dv, False)
    ]
    return [
        *plain,
        choose_form(128, 128, 64, out_matches=True, want_max=True, has_softcap=True, has_sink=True),
        choose_form(128, 128, 128, out_matches=False, want_max=True, accumulate=True),
        choose_form(128, 128, 128, out_matches=False, want_max=True),
        choose_form(96, 96, 128, out_matches=True, want_max=False),
        *three_consumers(),
    ]


def packed() -> list[Form]:
    """Heads that share a tile, whole or cut, in boxes of all shapes."""

    def form(d: int, bn: int, pack: int, staged: bool = True, **options: Any) -> Form:
        return choose_form(d, d, bn, out_matches=staged, want_max=True, pack=pack, **options)

    return [
        form(128, 128, 8),
        *(form(128, 128, pack, cuts=True) for pack in (2, 4, 64)),
        form(64, 128, 16, cuts=True),
        form(128, 64, 8, has_softcap=True, has_sink=True, cuts=True),
        form(128, 128, 8, staged=False, accumulate=True, cuts=True),
    ]


def pairs() -> list[Form]:
    """Query heads that share keys and values by twos: of all head dims that bring their columns in
    another way, with two and three consumers, and capped."""
    made = [
        *((d, d, bn, {}) for d, bn in ((128, 128), (128, 64), (64, 128), (256, 64))),
        (192, 128, 128, {}),
        (256, 256, 64, {"has_softcap": True, "has_sink": True}),
    ]
    found = [choose_form(*x, out_matches=True, want_max=True, **more) for *x, more in made]
    return [dataclasses.replace(form, paired=True) for form in (*found, *three_consumers()[1:2])]


def cuts() -> list[Form]:
    """Parts of tiles that meet."""

    def form(d: int, bn: int, staged: bool = True, **options: Any) -> Form:
        return choose_form(d, d, bn, out_matches=staged, want_max=True, cuts=True, **options)

    capped = (128,) if wastes_registers() else (128, 256)  # the other one is not cut there
    return [
        *(form(d, bn) for d in (64, 128, 256) for bn in block_ns(d, d, False)),
        *(form(d, 64, has_softcap=True, has_sink=True) for d in capped),
        form(128, 128, staged=False, accumulate=True),
        choose_form(192, 128, 128, out_matches=True, want_max=True, cuts=True),
    ]


def three_consumers() -> list[Form]:
    """They have 160 registers each, too few for some Tritons."""
    if wastes_registers():
        return []

    def form(bn: int, d: int = 64, staged: bool = True, **options: Any) -> Form:
        return choose_form(d, d, bn, out_matches=staged, want_max=True, consumers=3, **options)

    return [
        *(form(64), form(128)),
        form(64, has_softcap=True, has_sink=True),
        form(128, d=40, staged=False, accumulate=True),
    ]


def signature(form: Form, dtype: str = "bf16") -> tuple[dict[str, str], dict, dict]:
    """(types, constants, alignments) of a call with contiguous tensors of a dtype."""
    rows, columns = (form.own_rows // form.pack, form.pack), form.d // form.panels
    boxes = {"Q": (*rows, columns), "K": (form.bn, 1, columns), "V": (form.bn, 1, form.dv)}
    if form.staged or form.spools:
        boxes["O"] = (form.sent_rows // form.pack, form.pack, form.dv)
    absent = {"O"} - boxes.keys() | ({"SINK"} if not form.has_sink else set())
    absent |= {"MAX_LOGITS"} if not form.want_max else set()
    absent |= OF_CUTS if not form.cuts else set()
    absent |= set() if form.by_factors else OF_FACTORS
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    aligned = {}
    for index, name in enumerate(hopper_fwd.hopper_fwd_kernel.arg_names):
        if name == "FORM" or name in absent:
            types[name], constants[(index,)] = "constexpr", form if name == "FORM" else None
        elif name in boxes:
            block = list(boxes[name])
            layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
            types[name] = f"tensordesc<{dtype}{block},{layout!r}>"
        elif name == "OUT":
            apart = form.q_buffers == 2 and not form.staged
            chosen = form.consumers == 3 and copies_operands()
            chosen |= keeps_a_word(form.d, form.dv, form.pack, form.cuts, form.want_max)
            in_full = form.accumulate or (apart and not chosen)
            types[name] = "*fp32" if in_full else f"*{dtype}"
        elif name.isupper():
            types[name] = "*fp32" if name in FLOATS else "*i32"
        else:
            types[name] = "fp32" if name in ("scale", "softcap") else "i32"
        if types[name].startswith("*") or name.startswith("stride"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def compile_form(form: Form, dtype: str = "bf16") -> Any:
    """What a launch would run, after the check that it would make."""
    types, constants, aligned = signature(form, dtype)
    source = GluonASTSource(
        hopper_fwd.hopper_fwd_kernel, types, constexprs=constants, attrs=aligned
    )
    with sparing_ptxas() as options:
        options = {"num_warps": form.warps, "enable_fp_fusion": True, **options}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    check_compiled(form, compiled)
    return compiled


def main() -> None:
    args = command_line(__doc__, "whole", "others", "near", "all").parse_args()
    for form in part_of(forms(args.which), args.part):
        compiled = compile_form(form, args.dtype or "bf16")
        found = resources_and_spills(compiled)
        # to arrive at a neighbour's barrier, or to wait at one, takes none: see `hopper_pairs`
        found["fences"] = len(re.findall(r"mbarrier\.\S+\.cluster\.", compiled.asm["ptx"]))
        found["lazy"] = form.lazy
        found["votes"] = compiled.asm["ptx"].count("vote.sync.any")
        print(json.dumps(dataclasses.asdict(form) | found), flush=True)


if __name__ == "__main__":
    main()
