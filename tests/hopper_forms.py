"""Every form of the Hopper kernels that launches can choose, for head dims that fill their blocks
and some that do not.

No public call asks for some of them: out in fp32 or cut up without adding to what is there,
gradients in fp32 with a bias, three consumers with blocks of 64 keys.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from keel._versions import wastes_registers
from keel.kernels.hopper_bwd_launch import LARGEST_WITH_FP32_BIAS, choose_backward_form
from keel.kernels.hopper_dq_launch import choose_query_form, dq_block_ns
from keel.kernels.hopper_forms import BackwardForm, Form, QueryForm, WideForm
from keel.kernels.hopper_launch import (
    block_ns,
    can_be_paced,
    can_be_paired,
    can_pack,
    choose_form,
)

BackwardForms = BackwardForm | WideForm | QueryForm
BOTH = (False, True)
NARROW_DIMS = ((64, 64), (128, 128), (64, 128), (128, 64))
WIDE_DIMS = (
    (192, 128),
    (192, 64),
    (192, 192),
    (256, 256),
    (256, 128),
    (256, 64),
    (128, 256),
    (64, 256),
)
PACKS = (2, 4, 8, 16, 32, 64)


def paced(form: Form) -> Form:
    """With tiles that begin together, which are long."""
    as_they_lie = form.q_buffers == 1 and form.carries
    return replace(form, paced=True, spools=form.spools and not as_they_lie)


def forward_forms() -> Iterator[Form]:
    for dims, softcap, sink in product((*NARROW_DIMS, (96, 96), *WIDE_DIMS), BOTH, BOTH):
        for bn, cuts in product(block_ns(*dims, softcap), BOTH):
            scores = {"has_softcap": softcap, "has_sink": sink}
            for want_max, results in product(BOTH, ("staged", "unlike q", "accumulated")):
                if wastes_registers() and cuts and softcap and want_max and min(dims) > 192:
                    continue  # is not cut
                options: dict[str, Any] = {
                    **scores,
                    **{"want_max": want_max, "accumulate": results == "accumulated"},
                    **{"out_matches": results == "staged", "cuts": cuts},
                }
                form = choose_form(*dims, bn, **options)
                alone = [form, *([paced(form)] if can_be_paced(form) else [])]
                may_be_three = dims == (64, 64) and not (softcap or cuts)
                if may_be_three and not wastes_registers():
                    alone.append(choose_form(*dims, bn, consumers=3, **options))
                yield from alone
                yield from (replace(x, paired=True) for x in alone if can_be_paired(x, 2))
                if can_pack(*dims):
                    yield from (choose_form(*dims, bn, pack=pack, **options) for pack in PACKS)


def term_choices(largest: int, dtype: str) -> Iterator[tuple[dict[str, bool], str]]:
    """What is done to scores, and the dtype of a bias."""
    for softcap in BOTH:
        yield {"has_softcap": softcap}, dtype
        yield {"has_softcap": softcap, "has_alibi": True}, dtype
        for bias in (dtype, "fp32") if largest <= LARGEST_WITH_FP32_BIAS else (dtype,):
            yield {"has_softcap": softcap, "has_bias": True}, bias
    yield {"has_softcap": False, "has_alibi": True, "has_offset": True}, dtype


class Variant(NamedTuple):
    """A form of the backward, and what else it is compiled for."""

    form: BackwardForms
    dtype: str = "bf16"
    bias: str = "bf16"
    """Dtype of a bias, if there is one."""
    match: bool = True
    """Results have the dtype of q."""


def backward_forms(dtype: str = "bf16") -> Iterator[Variant]:
    for dims in (*NARROW_DIMS, *WIDE_DIMS):
        narrow = max(dims) <= 128
        for (scores, bias), persistent, match in product(
            term_choices(max(dims), dtype), BOTH, BOTH
        ):
            plain = not any(scores.get(term) for term in ("has_bias", "has_alibi"))
            options = {"persistent": persistent, **scores}
            by_keys = partial(choose_backward_form, *dims, outs_match=match, **options)
            forms: list[BackwardForms] = [by_keys(with_dq=False)]
            # with a softcap, dq of head dim 64 is always apart
            if narrow and plain and not (max(dims) == 64 and scores["has_softcap"]):
                turns = (True,) if persistent else BOTH if match else (False,)
                forms += [by_keys(with_dq=True, together=together) for together in turns]
            block_ns = dq_block_ns(*dims, scores["has_softcap"], not plain)
            for bn, dbias in product(block_ns, BOTH if scores.get("has_bias") else (False,)):
                more = {"out_matches": match, "want_dbias": dbias}
                forms.append(choose_query_form(*dims, bn, **more, **options))
            yield from (Variant(form, dtype, bias, match) for form in forms)


def command_line(about: str, *choices: str) -> argparse.ArgumentParser:
    """Which forms to compile: arguments of `compile_hopper.py` and `compile_hopper_bwd.py`."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("which", choices=choices, help="near: those near the limit of registers")
    parser.add_argument(
        "part", nargs="?", type=as_part, default="0/1", help="2/15: every 15th, from the third on"
    )
    parser.add_argument("dtype", nargs="?", choices=("bf16", "fp16"))
    return parser


def as_part(text: str) -> tuple[int, int]:
    """(first, step) of "2/15"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"expected a part such as 2/15 or 0/1, got {text}")
    return int(found[1]), int(found[2])


def part_of(forms: list[Any], part: tuple[int, int]) -> list[Any]:
    """Of (2, 15) every 15th, from the third on; all of (0, 1)."""
    first, step = part
    return forms[first::step]
