"""How results are judged: the tolerance rule, poisoned memory, one attention against the oracle.

The rule: ``max|x - ref64| <= 2 * max|low - ref64| + atol`` where ref64 is the oracle in fp64 on
the same inputs and low is plain torch in the input dtype: nobody tunes tolerances by hand. lse and
max_logits are held to fp32 whatever the input dtype. atol is a rounding step at the largest value
(64 steps in fp32, where exp2 and the order of sums differ from those of torch).
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from keel import reference
from keel.attention import flex_flash_attn_func
from keel.masks import AttnMask
from keel.meta import Scoring

FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Largest errors of one tensor against the fp64 oracle."""

    name: str
    error: float
    error_low: float
    atol: float

    @property
    def limit(self) -> float:
        return FACTOR * self.error_low + self.atol

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.name}: error {self.error:.3e}, allowed {self.limit:.3e} "
            f"(plain torch {self.error_low:.3e})"
        )


def compare(
    name: str,
    got: torch.Tensor,
    low: torch.Tensor,
    ref64: torch.Tensor,
    dtype: torch.dtype,
    *,
    terms: int = 0,
) -> Comparison:
    """Applies the rule; atol is a few rounding steps of `dtype` at the largest |ref64|.

    `terms`: how many numbers of size about 1 were added up for each result and may cancel.
    Infinities must match exactly; a NaN is an infinite error.
    """
    if got.shape != ref64.shape:
        raise ValueError(f"{name}: shape {tuple(got.shape)}, expected {tuple(ref64.shape)}")
    if ref64.numel() == 0:
        return Comparison(name, 0.0, 0.0, 0.0)
    finite = ref64.isfinite()
    same = torch.equal(torch.where(finite, 0.0, ref64), torch.where(finite, 0.0, got.double()))
    largest = float(torch.where(finite, ref64, 0.0).abs().max())

    def error(x: torch.Tensor) -> float:
        difference = torch.where(finite, x.double() - ref64, 0.0).abs()
        return float("inf") if difference.isnan().any() else float(difference.max())

    # 16-bit results are rounded once. Wider ones add up exp2 and sums in another order than torch.
    # Gradients cancel to about 0 where a row sees one key: a floor stands for their terms.
    steps, floor = {torch.float32: (64.0, 1.0), torch.float64: (4096.0, 1.0)}.get(
        dtype, (1.0, 0.05)
    )
    floor = max(floor, terms**0.5)
    atol = steps * torch.finfo(dtype).eps * max(largest, floor)
    return Comparison(name, error(got) if same else float("inf"), error(low), atol)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, torch.empty and its kin return NaNs, so that unwritten outputs show."""

    def poisoned(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return call

    with contextlib.ExitStack() as stack:
        for name in ("empty", "empty_like"):
            stack.enter_context(mock.patch.object(torch, name, poisoned(getattr(torch, name))))
        yield


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem, drawn from a seed."""

    mask: AttnMask
    hq: int = 2
    hk: int = 1
    d: int = 16
    dv: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    scale: float | None = None
    softcap: float = 0.0
    sink: bool = False
    bias_shape: tuple[int, int, int] | None = None
    """Sizes of the bias, each 1 or full."""
    alibi: bool = False
    with_dlse: bool = True
    """Let lse take part in the loss."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Inputs and gradients of the outputs, the same for the same seed."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            x = torch.randn(*shape, generator=random, dtype=torch.float64)
            return x.to(dtype).to(self.device)

        (tq, tk), dv = self.mask.shape, self.dv or self.d
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        made = {
            "q": normal(tq, self.hq, self.d),
            "k": normal(tk, self.hk, self.d),
            "v": normal(tk, self.hk, dv),
            "dout": normal(tq, self.hq, dv),
            "dlse": normal(tq, self.hq, dtype=wide),
        }
        if self.sink:
            made["sink"] = normal(self.hq, dtype=wide)
        if self.bias_shape is not None:
            made["bias"] = normal(*self.bias_shape)
        if self.alibi:
            made["alibi_slopes"] = normal(self.hq, dtype=wide).abs() * 0.1
        return made


def run_case(case: Case, *, backend: str, **options: Any) -> dict[str, torch.Tensor]:
    """out, lse, max_logits and all gradients of one call of the public function."""
    made = case.tensors()
    leaves = {n: x.requires_grad_() for n, x in made.items() if n in _LEAVES}
    out, meta = flex_flash_attn_func(
        made["q"],
        made["k"],
        made["v"],
        case.mask,
        softmax_scale=case.scale,
        softcap=case.softcap,
        sink=made.get("sink"),
        bias=made.get("bias"),
        alibi_slopes=made.get("alibi_slopes"),
        return_max_logits=True,
        backend=backend,
        **options,
    )
    return _with_gradients(case, made, leaves, out, meta.lse, meta.max_logits)


_LEAVES = ("q", "k", "v", "sink", "bias")


def _oracle(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same through the oracle, computed in `dtype`."""
    made = case.tensors()
    if dtype == torch.float64:
        made = {n: x.double() for n, x in made.items()}
    leaves = {n: x.requires_grad_() for n, x in made.items() if n in _LEAVES}
    scoring = Scoring(
        scale=case.d**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap,
        sink=made.get("sink"),
        bias=made.get("bias"),
        alibi_slopes=made.get("alibi_slopes"),
    )
    out, lse, top = reference.attention(
        made["q"], made["k"], made["v"], case.mask, scoring, dtype=dtype
    )
    return _with_gradients(case, made, leaves, out, lse, top)


def _with_gradients(
    case: Case,
    made: dict[str, torch.Tensor],
    leaves: dict[str, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    loss = (out * made["dout"]).sum()
    if case.with_dlse:
        finite = torch.where(lse == -torch.inf, 0.0, lse)
        loss = loss + (finite * made["dlse"]).sum()
    loss.backward()
    assert max_logits is not None
    results = {"out": out.detach(), "lse": lse.detach(), "max_logits": max_logits}
    for name, leaf in leaves.items():
        results[f"d{name}"] = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
    return results


def judge(case: Case, got: dict[str, torch.Tensor]) -> list[Comparison]:
    """Every tensor of a run against the oracle, by the tolerance rule."""
    ref64, low = _oracle(case, torch.float64), _oracle(case, case.dtype)
    wide = low if case.dtype == torch.float64 else _oracle(case, torch.float32)
    exact = torch.float64 if case.dtype == torch.float64 else torch.float32
    return [
        compare(name, x, wide[name], ref64[name], exact)
        if name in ("lse", "max_logits")
        else compare(name, x, low[name], ref64[name], case.dtype, terms=_rows_summed(case, name))
        for name, x in got.items()
    ]


def _rows_summed(case: Case, name: str) -> int:
    """Rows that a gradient of sink or bias adds up; within a row terms add up to about 1."""
    if name == "dsink":
        return case.mask.tq
    if name == "dbias" and case.bias_shape is not None:
        heads, rows, _ = case.bias_shape
        return (case.hq if heads == 1 else 1) * (case.mask.tq if rows == 1 else 1)
    return 0


def assert_right(case: Case, *, backend: str, **options: Any) -> None:
    """Runs a case on poisoned memory and raises with every tensor that breaks the rule."""
    with poisoned_memory():
        got = run_case(case, backend=backend, **options)
    broken = [str(c) for c in judge(case, got) if not c.ok]
    if broken:
        raise AssertionError(f"{case} on {backend} {options}:\n  " + "\n  ".join(broken))


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """Runs function(rank, *args) in num_ranks processes on gloo; their results in order of rank.

    The function must be importable. The default group is ready, with one thread for each process.
    An error on any rank is raised here, with its traceback; so is a rank that takes too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keel.testing", "keel.distributed", "keel.optim"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            where = f"file://{folder}/rendezvous"
            process = context.Process(
                target=_one_rank,
                args=(theirs, function, where, rank, num_ranks, timeout, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _results(ranks, timeout)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _results(ranks: list[Any], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results, errors = [], []
    for rank, (_, pipe) in enumerate(ranks):
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                errors.append(f"rank {rank} did not finish in {timeout} s")
                continue
            good, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            errors.append(f"rank {rank} died")
            continue
        results.append(value)
        if not good:
            errors.append(f"rank {rank}: {value}")
    if errors:
        raise RuntimeError("\n".join(errors))
    return results


def _one_rank(
    pipe: Any,
    function: Callable[..., Any],
    where: str,
    rank: int,
    num_ranks: int,
    timeout: float,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=where,
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )
        torch.distributed.barrier()  # one that is done at once must not leave others connecting
        value = (True, function(rank, *args))
    except BaseException:
        value = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(value))
    pipe.close()
