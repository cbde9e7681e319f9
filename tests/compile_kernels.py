"""Compiles the Triton kernels for GPUs that need not be there, and reads registers and spills.

Run as a program without TRITON_INTERPRET; prints one JSON line per kernel variant:

    python tests/compile_kernels.py 90 80
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keel.kernels import (
    barrier,
    clip_heads,
    flash_bwd,
    flash_fwd,
    gram,
    lab,
    qk_max,
    row_scale,
    softmax_bwd,
    softmax_fwd,
)
from keel.kernels.flash_common import TileConfig, fitted, padded
from keel.kernels.softmax_common import RowConfig, shape_constants

POINTERS_16 = {"Q", "K", "V", "OUT", "DOUT", "DK", "DVAL", "DQ", "X", "Y", "DY", "DX"}
POINTERS_16 |= {"TARGET_LIKE"}
POINTERS_32F = {"LSE", "LSE2", "DELTA", "SINK", "SLOPES", "DBIAS", "BIAS", "DLSE", "MAX_LOGITS"}
POINTERS_32F |= {"FACTOR", "SOURCE_LIKE", "TOP", "TAU", "GAMMA", "LARGEST", "POWER"}
POINTERS_64 = {"TARGET", "SOURCE", "STATE", "ALL_MISSES", "RECORD", "FLAG", "CLIPS", "PLACE"}
POINTERS_8 = {"MASK"}
POINTERS_16 |= {"A", "B", "C", "D"}
FLOATS = {"scale", "softcap", "alpha", "beta", "diagonal"}
OPTIONS = {"HAS_BIAS", "HAS_SOFTCAP", "HAS_ALIBI"}
POINTER_OF = {
    **{"BIAS": "HAS_BIAS", "DBIAS": "WANT_DBIAS", "SLOPES": "HAS_ALIBI", "OFFSET": "HAS_OFFSET"},
    **{"SINK": "HAS_SINK", "MAX_LOGITS": "WANT_MAX", "COUNTER": "PERSISTENT"},
}
STREAMED = {  # what a kernel may read through TMA descriptors, and the block of each
    "flash_fwd_kernel": {"K": ("BN", "D"), "V": ("BN", "DV")},
    "observed_fwd_kernel": {"K": ("BN", "D"), "V": ("BN", "DV")},
    "flash_bwd_dkdv_kernel": {"Q": ("BM", "D"), "DOUT": ("BM", "DV")},
    "flash_bwd_dq_kernel": {"K": ("BN", "D"), "V": ("BN", "DV")},
    "symmetric_product_kernel": {"A": ("BM", "BK"), "B": ("BN", "BK")},
    "qk_max_kernel": {"K": ("BN", "D")},
}


def compile_variant(
    kernel: Any,
    constants: dict[str, Any],
    config: TileConfig | RowConfig | gram.GramConfig,
    arch: int,
    dtype: str = "bf16",
    cluster: int = 1,
) -> Any:
    """The compiled kernel, with strides and pointers marked divisible by 16 as in real calls."""
    signature, attrs, constexprs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[name] = "constexpr", constants[name]
            continue
        if name in STREAMED.get(kernel.__name__, {}) and constants.get("TMA"):
            rows, dim = (constants[x] for x in STREAMED[kernel.__name__][name])
            signature[name] = f"tensordesc<{dtype}[{rows}, {dim}]>"
            continue
        if name in POINTERS_16:
            signature[name] = f"*{dtype}"
        elif name in POINTERS_32F:
            signature[name] = "*fp32"
        elif name in POINTERS_64:
            signature[name] = "*i64"
        elif name in POINTERS_8:
            signature[name] = "*u8"
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name.isupper():
            signature[name] = "*i32"
        else:
            signature[name] = "i32"
        if name.isupper() or (name.startswith("stride") and "softmax" not in kernel.__name__):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attrs)
    options = {
        **({"num_ctas": cluster} if cluster > 1 else {}),
        "num_warps": config.num_warps,
        "num_stages": getattr(config, "num_stages", 3),
        "maxnreg": getattr(config, "max_registers", None),
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(compiled: Any) -> dict[str, int]:
    """Registers per thread, bytes of stack (spills), shared memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")}
    return {**found, "shared": compiled.metadata.shared}


def loops_of(compiled: Any) -> list[list[str]]:
    """Instructions of innermost loops that hold matrix products.

    A loop is what lies between a backward branch and its target; innermost, if no other does.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    code = [(int(a, 16), op) for a, op in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;]*);", sass)]
    loops = []
    for address, op in code:
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", op)
        if branch and int(branch[1], 16) <= address:
            loops.append((int(branch[1], 16), address))
    bodies = []
    for begin, end in loops:
        if any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops):
            continue
        body = [op for address, op in code if begin <= address <= end]
        if any("MMA" in op for op in body):
            bodies.append(body)
    return bodies


def resources_and_spills(compiled: Any) -> dict[str, int]:
    """`resources`, and local loads and stores in loops: none without a stack.

    Then loops need not be looked for, which can take longer than compiling.
    """
    found = resources(compiled)
    on_stack = found["STACK"] or found["LOCAL"]
    return {**found, "loop_spills": spills_of(loops_of(compiled)) if on_stack else 0}


def spills_of(loops: list[list[str]]) -> int:
    """Local loads and stores."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", op)) for body in loops for op in body)


def absent_pointers(kernel: Any, on: dict[str, bool]) -> dict[str, None]:
    """Pointers whose option is off are None at compile time, as in real calls."""
    names = (n for n, flag in POINTER_OF.items() if n in kernel.arg_names and not on.get(flag))
    return dict.fromkeys(names)


def variants(arch: int):
    """Plain attention at each head dim, with narrow and with wide rows; and each option."""
    for d, dv in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for width in (256, 8192):
            yield forward_variant(d, dv, arch, width=width, WANT_MAX=True)
            yield from backward_variants(d, dv, arch, width=width)
    yield forward_variant(128, 128, arch, HAS_SINK=True, PERSISTENT=True)
    for option in ("HAS_BIAS", "HAS_SOFTCAP", "HAS_ALIBI"):
        for d in (128, 256):
            yield forward_variant(d, d, arch, WANT_MAX=True, **{option: True})
            yield from backward_variants(d, d, arch, **{option: True})


def forward_variant(
    d: int,
    dv: int,
    arch: int,
    config: TileConfig | None = None,
    width: float = 8192,
    **flags: bool,
):
    block_d, block_dv = padded(d), padded(dv)
    if config is None:
        width = 0 if OPTIONS & flags.keys() else width
        config = flash_fwd.choose_config(
            divmod(arch, 10), max(block_d, block_dv), torch.bfloat16, width
        )
        config = fitted(config, flags.get("HAS_BIAS", False))
    on = {
        name: flags.get(name, False)
        for name in (
            *("HAS_SINK", "HAS_BIAS", "HAS_ALIBI", "HAS_OFFSET", "HAS_SOFTCAP"),
            *("WANT_MAX", "ACCUMULATE", "PERSISTENT"),
        )
    }
    constants = {
        **{"D": d, "DV": dv, "BLOCK_D": block_d, "BLOCK_DV": block_dv},
        **{"BM": config.block_m, "BN": config.block_n, "PRECISION": "tf32", **on},
        "TMA": config.tma and (d, dv) == (block_d, block_dv),
        "PTX": True,
    }
    constants |= absent_pointers(flash_fwd.flash_fwd_kernel, on)
    return flash_fwd.flash_fwd_kernel, constants, config


def backward_variants(
    d: int,
    dv: int,
    arch: int,
    configs: tuple[TileConfig, TileConfig] | None = None,
    width: float = 8192,
    **flags: bool,
):
    block_d, block_dv = padded(d), padded(dv)
    if configs is None:
        width = 0 if OPTIONS & flags.keys() else width
        configs = flash_bwd.choose_configs(
            divmod(arch, 10), max(block_d, block_dv), torch.bfloat16, width
        )
        configs = tuple(fitted(c, flags.get("HAS_BIAS", False)) for c in configs)
    names = ("HAS_BIAS", "HAS_ALIBI", "HAS_OFFSET", "HAS_SOFTCAP", "PERSISTENT")
    on = {name: flags.get(name, False) for name in names}
    for kernel, config in zip(
        (flash_bwd.flash_bwd_dkdv_kernel, flash_bwd.flash_bwd_dq_kernel), configs, strict=True
    ):
        constants = {
            **{"D": d, "DV": dv, "BLOCK_D": block_d, "BLOCK_DV": block_dv},
            **{"BM": config.block_m, "BN": config.block_n, "PRECISION": "tf32", **on},
            "TMA": config.tma and (d, dv) == (block_d, block_dv),
        }
        if kernel is flash_bwd.flash_bwd_dq_kernel:
            constants["WANT_DBIAS"] = False
        constants |= absent_pointers(kernel, on)
        yield kernel, constants, config


def softmax_variants(arch: int):
    """Tabled configs, plain, causal and masked: all of them for the GPU they were measured on."""
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
    between = (
        640,
        1001,
        1536,
        3072,
        4000,
        5000,
        7200,
        8000,
        10_240,
        20_480,
        24_577,
        28_672,
        30_000,
    )
    for sk in (*lengths, *between) if arch == 90 else (512, 5000, 65_536):
        for kind in ("plain", "causal", "masked"):
            yield softmax_forward_variant(sk, kind, arch)
            if kind != "masked":
                yield softmax_backward_variant(sk, kind)


def softmax_constants(config: RowConfig, sk: int, kind: str) -> dict[str, Any]:
    skewed = sk % 8 != 0
    return {
        **shape_constants(config, (-sk, 0 if kind == "causal" else sk), sk, sk, 1 if skewed else 8),
        **{"PTX": True, "SKEWED": skewed},
        "EXACT": kind != "causal" and sk % (config.width * config.parts) == 0,
    }


def softmax_forward_variant(
    sk: int, kind: str, arch: int = 90, config: RowConfig | None = None
) -> tuple[Any, dict[str, Any], RowConfig]:
    shared = {80: 166_912, 86: 101_376, 90: 232_448}.get(arch, 101_376)
    masked = kind == "masked"
    if config is None and sk % 8:
        config = softmax_fwd.choose_skewed(sk, kind == "causal", int(masked))
    elif config is None:
        config = softmax_fwd.choose_config(sk, kind == "causal", int(masked), 2, 8, shared)
    constants = {
        **softmax_constants(config, sk, kind),
        **dict.fromkeys(("HAS_SINK", "UNIFORM", "WANT_LSE", "HAS_SOFTCAP"), False),
        **{"WANT_MAX": True, "STAGES": config.stages},
        **{"MASK_KIND": int(masked), "DENSE_MASK": masked, "TURN": 16 if masked else 0},
        **dict.fromkeys(("SINK", "LSE") if masked else ("SINK", "LSE", "MASK")),
    }
    return softmax_fwd.softmax_fwd_kernel, constants, config


def softmax_backward_variant(
    sk: int, kind: str, config: RowConfig | None = None
) -> tuple[Any, dict[str, Any], RowConfig]:
    if config is None and sk % 8:
        config = softmax_bwd.choose_skewed(sk)
    elif config is None:
        config = softmax_bwd.choose_config(sk, kind == "causal", 8)
    constants = softmax_constants(config, sk, kind)
    constants |= dict.fromkeys(("HAS_LSE", "WANT_DOT", "HAS_SOFTCAP"), False)
    constants["EXACT"] &= config.one_pass
    constants |= dict.fromkeys(("X", "LSE", "DOT"))
    return softmax_bwd.softmax_bwd_kernel, constants, config


def gram_variants(arch: int):
    """X·Xᵀ and the polynomial, of large and of small matrices."""
    for m in (4096, 256):
        config = gram.choose_config(divmod(arch, 10), m, torch.bfloat16)
        for has_c in (False, True):
            constants: dict[str, Any] = {
                **{"BM": config.block_m, "BN": config.block_n, "BK": config.block_k},
                **{"HAS_C": has_c, "EVEN_K": True, "TMA": config.tma, "WIDE": False},
                **{"PRECISION": "ieee"},
                **({} if has_c else {"C": None}),
            }
            yield gram.symmetric_product_kernel, constants, config


def clip_variants(arch: int):
    """What QK-Clip runs: maxima at each head dim, rows scaled in place and rounded from masters."""
    for d in (64, 128, 192, 256):
        config = qk_max.choose_config(divmod(arch, 10), padded(d), torch.bfloat16)
        constants: dict[str, Any] = {
            **{"D": d, "BLOCK_D": padded(d), "BM": config.block_m, "BN": config.block_n},
            **{"PRECISION": "tf32", "TMA": config.tma and d == padded(d), "PTX": True},
        }
        yield qk_max.qk_max_kernel, constants, config
    for copy in (False, True):
        constants = {"BLOCK": row_scale.BLOCK, "SPLITS": row_scale.SPLITS}
        constants |= {"ALIGNED": True, "COPY": copy}
        yield row_scale.row_scale_kernel, constants, TileConfig(1, row_scale.BLOCK, 4, 3)
    block = clip_heads.BLOCK
    yield clip_heads.clip_heads_kernel, {"BLOCK": block}, TileConfig(1, block, 4, 3)


def overlap_variants(arch: int):
    """The barrier, and what the lab runs: attention that takes notes, and traffic in clusters."""
    small = TileConfig(1, 1, 1, 3)
    yield barrier.mark_kernel, {}, small, 1
    yield barrier.wait_kernel, {"PTX": True}, small, 1
    for persistent in (False, True):
        _, constants, config = forward_variant(128, 128, arch, PERSISTENT=persistent)
        yield lab.observed_fwd_kernel, constants, config, 1
    for cluster in (1, 2, 4) if arch >= 90 else (1,):
        constants = {"CHUNK": cluster * lab.CHUNK, "MARKS": cluster > 1}
        constants |= {} if cluster > 1 else {"FLAG": None}
        yield lab.traffic_kernel, constants, TileConfig(1, 1, lab.TRAFFIC_WARPS, 3), cluster


def report(
    kernel: Any,
    constants: dict[str, Any],
    config: TileConfig | RowConfig | gram.GramConfig,
    arch: int,
    cluster: int = 1,
) -> None:
    compiled = compile_variant(kernel, constants, config, arch, cluster=cluster)
    flags = [n for n, x in constants.items() if x is True]
    line = {
        "kernel": kernel.__name__,
        "arch": arch,
        "d": constants.get("D"),
        "dv": constants.get("DV"),
        "config": list(astuple(config)),
        "flags": flags,
        "cluster": cluster,
        **resources_and_spills(compiled),
    }
    print(json.dumps(line), flush=True)


def main(archs: list[int]) -> None:
    for arch in archs:
        done = set()
        everything = (
            *variants(arch),
            *softmax_variants(arch),
            *gram_variants(arch),
            *clip_variants(arch),
        )
        for kernel, constants, config in everything:
            key = (kernel.__name__, tuple(constants.items()), config)
            if key not in done:
                done.add(key)
                report(kernel, constants, config, arch)
        for kernel, constants, config, cluster in overlap_variants(arch):
            report(kernel, constants, config, arch, cluster)


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [90, 80])
