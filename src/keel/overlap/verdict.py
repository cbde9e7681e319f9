"""Verdicts: a sentence for what stands out in a report, with the next thing to do."""

from __future__ import annotations

from keel.overlap.report import RankReport, Report, percent

NEGLIGIBLE = 0.02
"""A share of the span below which nothing is worth doing."""
GOOD = 0.95
IDLE = 0.2


def verdicts(report: Report) -> list[str]:
    """Lines about the worst rank, its stages, late ranks and idle time."""
    worst = report.worst
    if worst is None:
        return ["nothing to measure: no GPU work was seen"]
    lines = [_communication(worst)]
    exposed = [stage for stage in worst.stages if stage.exposed_ms > 0]
    if exposed and worst.exposed_share > NEGLIGIBLE:
        stage = max(exposed, key=lambda stage: stage.exposed_ms)
        lines.append(
            f"stage {stage.name!r} exposes most, {stage.exposed_ms:.3f} ms of "
            f"{stage.communication_ms:.3f} ms: give it more compute to hide behind, or fewer bytes"
        )
    lines += _late(report)
    idle = max(report.ranks, key=lambda rank: rank.idle_ms / max(rank.span_ms, 1e-9))
    if idle.idle_ms > IDLE * idle.span_ms:
        lines.append(
            f"rank {idle.rank} is idle {percent(idle.idle_ms / idle.span_ms)} of the time: the GPU "
            "waits for launches or for the host; use CUDA graphs or larger batches, and trace "
            "without warm-up steps"
        )
    if worst.exposed_copies_ms > NEGLIGIBLE * worst.span_ms:
        lines.append(
            f"copies take {worst.exposed_copies_ms:.3f} ms by themselves on rank {worst.rank}: pin "
            "host memory and copy on a stream of their own"
        )
    if report.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        lines.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: kernels start in the order of their launches, which "
            "serialises what could overlap; try without it"
        )
    return lines


def _communication(rank: RankReport) -> str:
    ratio = rank.overlap_ratio
    if ratio is None:
        return (
            "no communication found: if there was some, name its kernels "
            "(--communication PATTERN, Rules(communication=[...]))"
        )
    start = f"rank {rank.rank} hides {percent(ratio)} of its communication"
    if ratio >= GOOD:
        return f"{start}: good; compare its time with a run without overlap (keel overlap compare)"
    exposed = (
        f"{start} and exposes {rank.exposed_ms:.3f} ms ({percent(rank.exposed_share)} of the span)"
    )
    if rank.exposed_share < NEGLIGIBLE:
        return f"{exposed}: too little to matter"
    if rank.communication_ms > rank.compute_ms:
        times = rank.communication_ms / rank.compute_ms if rank.compute_ms else float("inf")
        return (
            f"{exposed}: communication takes {times:.1f}x the compute and cannot all be hidden; "
            "send fewer bytes (another balance, bf16, hierarchy) or compute more between exchanges"
        )
    return (
        f"{exposed}, though compute would cover it: start it earlier, in more stages, and let it "
        "start: sm_margin, TORCH_NCCL_HIGH_PRIORITY=1, a kernel barrier"
    )


def _late(report: Report) -> list[str]:
    if not report.skews:
        return []
    row = report.skews[0]
    if row.waited_ms < NEGLIGIBLE * report.span_ms:
        return []
    return [
        f"rank {row.straggler} comes late to {row.name} ({row.max_skew_ms:.3f} ms at worst, last "
        f"in {percent(row.straggler_share)}); the others wait {row.waited_ms:.3f} ms in all: "
        "balance the work before it; a faster network would not help"
    ]
