"""Which other libraries are here, to be timed beside Keel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from keel.bench import catalog

FA3_FOLDER = "KEEL_BENCH_FA3"
"""Environment variable: a folder with fa3_peer.py, which loads FlashAttention-3."""

PACKAGES = (
    ("FlashAttention-3", "flash_attn_interface", "flash_attn_3", "attention"),
    ("FlashAttention-2", "flash_attn", "flash_attn", "nothing: torch's own is timed"),
    ("TransformerEngine", "transformer_engine", "transformer_engine", "softmax"),
    ("Liger", "liger_kernel", "liger_kernel", "softmax"),
    ("transformers", "transformers", "transformers", "its attention interface, not timed"),
)
"""Name, module, distribution, what it is timed in."""


@dataclass(frozen=True)
class Peer:
    name: str
    found: bool
    version: str
    """Of what was found; else why it was not."""
    used_in: str


def find_peers(folder: Path | None = None) -> list[Peer]:
    """Looks without importing: some of these take seconds, and some break where they do not fit."""
    peers = [_package(*each) for each in PACKAGES]
    if not peers[0].found and (place := fa3_folder(folder)) is not None:
        peers[0] = Peer("FlashAttention-3", True, f"{place.name}/fa3_peer.py", "attention")
    return [
        *peers,
        _torch_kernels("cuDNN through torch", _cudnn_version()),
        _torch_kernels("FlashAttention-2 through torch", torch.__version__),
        Peer("torch's attention", True, torch.__version__, "attention on CPUs"),
        _compiler(),
    ]


def fa3_folder(folder: Path | None = None) -> Path | None:
    """The one given, else that of the environment, else .peers beside benchmarks/.

    None where it has no fa3_peer.py.
    """
    place = folder or Path(os.environ.get(FA3_FOLDER) or catalog.folder().parent / ".peers")
    return place if (place / "fa3_peer.py").exists() else None


def _package(name: str, module: str, distribution: str, used_in: str) -> Peer:
    if importlib.util.find_spec(module) is None:
        return Peer(name, False, f"{module} is not installed", used_in)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"
    return Peer(name, True, version, used_in)


def _torch_kernels(name: str, version: str) -> Peer:
    found = torch.cuda.is_available()
    return Peer(name, found, version if found else "needs a CUDA GPU", "attention")


def _cudnn_version() -> str:
    number = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return "" if number is None else f"cuDNN {number}"


def _compiler() -> Peer:
    """torch.compile: FlexAttention and the compiled softmax."""
    used_in = "attention (FlexAttention), softmax"
    if not torch.cuda.is_available():
        return Peer("torch.compile", False, "timed on GPUs alone", used_in)
    if importlib.util.find_spec("triton") is None:
        return Peer("torch.compile", False, "triton is not installed", used_in)
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        return Peer("torch.compile", False, "Triton needs a C compiler", used_in)
    return Peer("torch.compile", True, torch.__version__, used_in)
