"""Trials of the lab, run as a program in an environment that has been set for it.

Prints a line of JSON for each setting, also for one that fails.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keel import flex_flash_attn_func, masks
from keel.overlap.barrier import KernelBarrier
from keel.overlap.lab import ROW, Bench, Row, Setting, overlap_of, shared_sms

HEAD_START_US = 100
"""By which attention is launched before communication."""
GATE_US = 1000
"""How long both are held in a race: longer than two launches take."""
BOUND_US = 3000
"""Of the barrier: attention that waits in vain goes on after this."""
MAX_FAILURES = 3
"""In a row; a device that failed once mostly fails for good."""


@dataclass(frozen=True)
class Seen:
    """One repeat."""

    overlap: float
    attention_ms: float
    comm_ms: float
    started_us: float
    shared: int
    comm_sms: int
    moved: float


class Trials:
    """All that settings of a bench share: tensors, streams, kernels prepared once."""

    def __init__(self, bench: Bench) -> None:
        from keel.kernels.lab import ObservedAttention, Traffic

        self.bench, self.device = bench, torch.device("cuda", torch.cuda.current_device())
        self._attention_of, self._traffic_of = ObservedAttention, Traffic
        shapes = (bench.heads, bench.kv_heads, bench.kv_heads)
        self.qkv = [
            torch.randn(bench.tokens, h, bench.head_dim, device=self.device, dtype=torch.bfloat16)
            for h in shapes
        ]
        self.mask = masks.causal(bench.tokens)
        self.caller = torch.cuda.Stream(self.device)
        self.lanes = {p: torch.cuda.Stream(self.device, priority=-p) for p in (0, 1)}
        self.barrier = KernelBarrier(bench.blocks, device=self.device, timeout_us=BOUND_US)
        self._attentions: dict[Any, Any] = {}
        self._traffics: dict[Any, Any] = {}
        self._alone: dict[Any, float] = {}
        self._library: dict[Any, float] = {}

    def attention(self, grid: str, margin: int) -> Any:
        if (grid, margin) not in self._attentions:
            q, k, v = self.qkv
            attention = self._attention_of(
                q, k, v, self.mask, persistent=grid == "persistent", sm_margin=margin
            )
            self._check(attention, margin)
            self._attentions[grid, margin] = attention
        return self._attentions[grid, margin]

    def traffic(self, blocks: int, span_us: float, cluster: int = 1, marks: bool = False) -> Any:
        key = blocks, span_us, cluster, marks
        if key not in self._traffics:
            self._traffics[key] = self._traffic_of(
                blocks,
                span_us=span_us,
                gb_per_s=self.bench.gb_per_s * blocks / self.bench.blocks,
                device=self.device,
                cluster=cluster,
                flag=self.barrier.flag if marks else None,
            )
        return self._traffics[key]

    def alone_ms(self, grid: str, margin: int) -> float:
        """Attention without communication; the median."""
        if (grid, margin) not in self._alone:
            kernel = self.attention(grid, margin)
            times = [self._time(kernel) for _ in range(self.bench.repeats + 2)]
            self._alone[grid, margin] = statistics.median(times[2:])
        return self._alone[grid, margin]

    def library_ms(self, grid: str, margin: int) -> float | None:
        """A call of the library; None where it would launch another grid."""
        if (grid == "tiles") != (margin == 0):
            return None
        if margin not in self._library:
            times = []
            for _ in range(self.bench.repeats + 2):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                self._call(margin)
                events[1].record()
                torch.cuda.synchronize()
                times.append(events[0].elapsed_time(events[1]))
            self._library[margin] = statistics.median(times[2:])
        return self._library[margin]

    def _call(self, margin: int) -> torch.Tensor:
        q, k, v = self.qkv
        return flex_flash_attn_func(q, k, v, self.mask, sm_margin=margin, backend="triton")[0]

    def _check(self, attention: Any, margin: int) -> None:
        """Times of wrong results mean nothing."""
        attention()
        torch.testing.assert_close(attention.out, self._call(margin), atol=1e-2, rtol=1e-2)

    def observe(self, setting: Setting) -> Row:
        """The row of a setting."""
        if setting.scenario == "chain":
            return self._chain()
        bench = self.bench
        attention = self.attention(setting.grid, setting.sm_margin)
        traffic = self.traffic(bench.blocks, bench.span_us, setting.cluster, setting.barrier)
        alone = self.alone_ms(setting.grid, setting.sm_margin)
        fits = self._fits_beside(attention, traffic)
        comm_alone = self._time(traffic)
        tiles, bases, seen = self.attention("tiles", 0), [], []
        trial = self._behind if setting.scenario == "behind" else self._race
        trial(setting, attention, traffic)  # compiles, and warms up
        self._settle()
        before = self.barrier.misses()
        for _ in range(bench.repeats):
            bases.append(self._time(tiles))  # beside each trial: clocks change with heat
            trial(setting, attention, traffic)
            seen.append(_seen(traffic, attention))
        missed = self.barrier.misses() - before
        overlaps = [x.overlap for x in seen]
        base, took = statistics.median(bases), statistics.median(x.attention_ms for x in seen)
        return {
            "overlap": statistics.median(overlaps),
            **{"overlap_min": min(overlaps), "overlap_max": max(overlaps)},
            **{"attention_ms": took, "alone_ms": alone, "base_ms": base},
            "library_ms": self.library_ms(setting.grid, setting.sm_margin),
            "slowdown": took / base - 1,
            "comm_ms": statistics.median(x.comm_ms for x in seen),
            "comm_alone_ms": comm_alone,
            "moved_gb_per_s": statistics.median(x.moved / x.comm_ms / 1e6 for x in seen),
            "started_us": statistics.median(x.started_us for x in seen),
            "comm_sms": seen[-1].comm_sms,
            "shared_sms": max(x.shared for x in seen),
            "misses": missed,
            "fits_beside": fits,
        }

    def _behind(self, setting: Setting, attention: Any, traffic: Any) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(self.caller):
            if setting.barrier:
                self.barrier.wait()
            attention()
        launched = time.perf_counter()
        while time.perf_counter() - launched < 1e-6 * HEAD_START_US:
            pass
        with torch.cuda.stream(self.lanes[setting.priority]):
            traffic()
        torch.cuda.synchronize()

    def _race(self, setting: Setting, attention: Any, traffic: Any) -> None:
        gate, lane = self.traffic(1, GATE_US), self.lanes[setting.priority]
        torch.cuda.synchronize()
        with torch.cuda.stream(self.caller):
            gate()
        lane.wait_event(self.caller.record_event())
        with torch.cuda.stream(lane):
            traffic()
        with torch.cuda.stream(self.caller):
            attention()
        torch.cuda.synchronize()

    def _chain(self) -> Row:
        """Two long kernels of one stream, one of another: does it wait for what they wait for?"""
        span = self.bench.span_us
        first, second = self.traffic(1, 2 * span), self.traffic(1, 2.5 * span)
        other = self.traffic(1, span)
        overlaps = []
        for n in range(self.bench.repeats + 1):
            torch.cuda.synchronize()
            with torch.cuda.stream(self.caller):
                first()
                second()
            with torch.cuda.stream(self.lanes[0]):
                other()
            torch.cuda.synchronize()
            if n:
                overlaps.append(overlap_of(_read(other), _read(first)))
        return {
            "overlap": statistics.median(overlaps),
            **{"overlap_min": min(overlaps), "overlap_max": max(overlaps)},
        }

    def _time(self, kernel: Any) -> float:
        """Milliseconds from the first block's begin to the last one's end."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.caller):
            kernel()
        torch.cuda.synchronize()
        return _span_ms(_read(kernel))

    def _settle(self) -> None:
        """Marks that nobody waited for, as those of timing alone, are taken back."""
        assert self.barrier.flag is not None
        torch.cuda.synchronize()
        self.barrier.flag[:2] = 0
        torch.cuda.synchronize()

    def _fits_beside(self, attention: Any, traffic: Any) -> bool | None:
        """Whether an SM has room for a block of each; None where Triton does not say."""
        compiled = attention(), traffic()
        torch.cuda.synchronize()
        chip = torch.cuda.get_device_properties(self.device)
        registers = threads = shared = 0
        for kernel in compiled:
            if getattr(kernel, "n_regs", None) is None:
                return None
            warps = kernel.metadata.num_warps
            registers += warps * 32 * (-(-kernel.n_regs // 8) * 8)
            threads += warps * 32
            shared += kernel.metadata.shared + 1024  # which the system keeps for each block
        return bool(
            registers <= getattr(chip, "regs_per_multiprocessor", 65_536)
            and threads <= chip.max_threads_per_multi_processor
            and shared <= getattr(chip, "shared_memory_per_multiprocessor", 233_472)
        )


def _read(kernel: Any) -> NDArray[np.int64]:
    record: NDArray[np.int64] = kernel.record.cpu().numpy()
    return record


def _span_ms(record: NDArray[np.int64]) -> float:
    return float(record[:, 1].max() - record[:, 0].min()) / 1e6


def _seen(traffic: Any, attention: Any) -> Seen:
    moved, computed = _read(traffic), _read(attention)
    return Seen(
        overlap=overlap_of(moved, computed),
        attention_ms=_span_ms(computed),
        comm_ms=_span_ms(moved),
        started_us=float(moved[:, 0].min() - computed[:, 0].min()) / 1e3,
        shared=shared_sms(moved, computed),
        comm_sms=len(np.unique(moved[:, 2])),
        moved=float(traffic.bytes_moved()),
    )


def main(work: str) -> None:
    """`work`: JSON with the bench and its settings."""
    given = json.loads(work)
    bench, todo = Bench(**given["bench"]), [Setting(**x) for x in given["settings"]]
    import triton

    chip = torch.cuda.get_device_properties(torch.cuda.current_device())
    about = {"gpu": chip.name, "sms": chip.multi_processor_count}
    about |= {"torch": torch.__version__, "triton": triton.__version__}
    trials = Trials(bench)
    failures = 0
    for setting in todo:
        row: Row = {**asdict(setting), **asdict(bench), **about}
        try:
            row |= trials.observe(setting)
            failures = 0
        except Exception as error:  # of any kind: the others are to be seen
            failures += 1
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        print(ROW + json.dumps(row), flush=True)
        if failures == MAX_FAILURES:
            sys.exit("too many failures in a row")


if __name__ == "__main__":
    main(sys.argv[1])
