"""MagiAttention's settings. What they mean here stands beside each; the rest has no effect."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class AttnOverlapMode(Enum):
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class DispatchAlg:
    """Who gets which tokens. Two are known here; the others are named in the log and mean the
    first."""


@dataclass(frozen=True)
class MinHeapDispatchAlg(DispatchAlg):
    """Equal work on all ranks: Keel's own solver."""


@dataclass(frozen=True)
class SequentialDispatchAlg(DispatchAlg):
    """Tokens in order, one piece per rank."""


@dataclass(frozen=True)
class LBDispatchAlg(DispatchAlg):
    pass


@dataclass(frozen=True)
class DPDispatchAlg(DispatchAlg):
    pass


@dataclass(frozen=True)
class BSDispatchAlg(DispatchAlg):
    pass


@dataclass(frozen=True)
class ToppHeapDispatchAlg(DispatchAlg):
    top_p: float = 0.0


@dataclass(frozen=True)
class SortedSequentialSelectAlg(DispatchAlg):
    allocation_ratio: float = 1.0


@dataclass(frozen=True)
class OverlapAlg:
    """How remote keys are cut into stages."""


@dataclass(frozen=True)
class UniformOverlapAlg(OverlapAlg):
    """Stages of about equal size, as they always are here."""

    random_costs: bool = False
    random_seed: int | None = None


@dataclass(frozen=True)
class GreedyOverlapAlg(OverlapAlg):
    """Named in the log; means the other."""


@dataclass(frozen=True)
class DispatchConfig:
    chunk_size: int | None = None
    """No effect: the solver has its own unit."""
    uneven_shard: bool = False
    """Both values mean the same, since nothing is padded."""
    alg: DispatchAlg = MinHeapDispatchAlg()


@dataclass(frozen=True)
class OverlapConfig:
    mode: AttnOverlapMode = AttnOverlapMode.STATIC
    degree: int | None = 1
    """Stages of remote keys; 0: one blocking fetch; None: what the cost model finds fastest.
    DYNAMIC mode means None too, and overrules the default."""
    dynamic_max_degree: int | None = 8
    """The most stages that the cost model may choose."""
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: OverlapAlg = UniformOverlapAlg()
    calc_cost_factor: float = 1.0
    """Microseconds per attended pair, all heads together. Both factors 1: Keel's own rates."""
    comm_cost_factor: float = 1.0
    """Microseconds per key row that travels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", AttnOverlapMode(self.mode))
        if self.mode is AttnOverlapMode.DYNAMIC and self.degree not in (None, 1):
            raise ValueError(f"DYNAMIC mode chooses the degree: leave out degree={self.degree}")
        if self.degree is not None and self.degree < 0:
            raise ValueError(f"degree must not be negative, got {self.degree}")
        for name in ("dynamic_max_degree", "calc_cost_factor", "comm_cost_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def stages(self) -> int | Literal["auto"]:
        if self.degree is None or self.mode is AttnOverlapMode.DYNAMIC:
            return "auto"
        return self.degree


@dataclass(frozen=True)
class GrpCollConfig:
    """Sizes for the original's own collectives. No effect."""

    num_sms: int = 24
    nvl_chunk_size: int = 8
    nvl_buffer_size: int = 256
    rdma_chunk_size: int = 16
    rdma_buffer_size: int = 128
    num_nvl_bytes: int = int(2e9)
    num_rdma_bytes: int = 0


@dataclass(frozen=True)
class DistAttnConfig:
    dispatch_config: DispatchConfig = DispatchConfig()
    overlap_config: OverlapConfig = OverlapConfig()
    grpcoll_config: GrpCollConfig = GrpCollConfig()
