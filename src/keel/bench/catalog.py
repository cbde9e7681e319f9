"""The benchmarks that there are, what each is given, and where their programs lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MASKS = ("full", "causal", "vfull", "vcausal", "swa", "blockcausal", "tiny", "video")
PEERS = ("fa3", "fa3-loop", "cudnn", "flash", "sdpa", "flex")
PASSES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A program, with its arguments for a whole run and for a quick one."""

    name: str
    about: str
    csv: str
    quick: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] | None = None
    """Arguments where there is no GPU; None: needs one."""
    full_on_cpu: tuple[str, ...] | None = None
    """The same for a run that is not quick; None: needs a GPU."""
    limit_s: float = 900.0
    """Of a whole run, beyond which it is ended; a quick one has a third."""

    def arguments(self, *, quick: bool, has_gpu: bool) -> tuple[str, ...] | None:
        """None where it needs a GPU that is not there."""
        if has_gpu:
            return self.quick if quick else ()
        return self.on_cpu if quick else self.full_on_cpu


BENCHMARKS = (
    Benchmark(
        name="attention",
        about="attention beside its peers, eight masks",
        csv="attention.csv",
        quick=("--quick", "--seconds", "150"),
        on_cpu=("--quick", "--seconds", "50", "--rounds", "3", "--sample-ms", "10"),
    ),
    Benchmark(
        name="max_logits",
        about="what max logits cost",
        csv="max_logits.csv",
        quick=("--lengths", "1024", "4096", "--pairs", "30", "--seconds", "30"),
    ),
    Benchmark(
        name="softmax",
        about="fused softmax beside torch and what else is installed",
        csv="softmax.csv",
        quick=("--quick",),
        on_cpu=("--quick", "--only", "eager", "--rounds", "2", "--lengths", "512"),
    ),
    Benchmark(
        name="muon",
        about="Muon beside torch.optim.Muon",
        csv="muon.csv",
        quick=("--quick", "--rounds", "3"),
        on_cpu=("--quick", "--rounds", "2"),
    ),
    Benchmark(
        name="qk_clip",
        about="a step of QK-Clip, and max logits from q and k",
        csv="qk_clip.csv",
        quick=("--quick",),
    ),
    Benchmark(
        name="host_cost",
        about="microseconds of the host per call",
        csv="host_cost.csv",
        quick=("--calls", "200"),
    ),
    Benchmark(
        name="balance",
        about="layouts for context parallelism",
        csv="balance.csv",
        quick=("--ranks", "8", "16", "--repeats", "1"),
        on_cpu=("--ranks", "8", "--repeats", "1"),
        full_on_cpu=(),
    ),
)
NAMES = tuple(x.name for x in BENCHMARKS)


def folder() -> Path:
    """Where the programs lie: inside of the installed package, or beside the sources."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "benchmarks", package.parents[1] / "benchmarks"):
        if (place / "attention.py").exists():
            return place
    raise FileNotFoundError(
        f"there are no benchmarks beside {package.name}: install keel-attn from a wheel, or run "
        "from a checkout"
    )


def chosen(names: list[str]) -> tuple[Benchmark, ...]:
    """Those of these names, in their usual order; all for none.

    >>> [x.name for x in chosen(["balance", "muon"])]
    ['muon', 'balance']
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"there is no benchmark {name!r}: one of {', '.join(NAMES)}")
    return tuple(x for x in BENCHMARKS if not names or x.name in names)
