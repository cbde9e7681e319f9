"""Text that every machine has: the bytes of Python's own standard library, as packed documents.

Nothing is downloaded. Stretches of the files are documents; they stand end to end, in an order
drawn from a seed, and a step takes the next bytes of them. So a batch follows from the seed and
the number of the step, and a run that resumes needs no other position.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from keel import masks
from keel.masks import AttnMask

VOCABULARY = 256
"""Tokens are bytes."""
NO_TARGET = -100
"""What cross_entropy ignores: the last byte of a document has no next one."""
SHORTEST, LONGEST = 32, 512
"""Bytes of a document; the last one of a file may be shorter."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents of one step, end to end."""

    tokens: torch.Tensor
    """(t,) int64."""
    targets: torch.Tensor
    """(t,) int64: the next byte of the same document, or NO_TARGET."""
    bounds: list[int]
    """Cumulative, from 0 to t."""

    @property
    def mask(self) -> AttnMask:
        return masks.documents(self.bounds, causal=True)

    @property
    def num_targets(self) -> int:
        return int((self.targets != NO_TARGET).sum())


class Corpus:
    """Packed documents of some files, in an order drawn from a seed.

    >>> corpus = Corpus([b"import this", b"pass"], seed=0)
    >>> batch = corpus.batch(0, num_tokens=15)
    >>> sorted(bytes(batch.tokens.tolist())) == sorted(b"import thispass"), len(batch.bounds)
    (True, 3)
    """

    def __init__(self, files: list[bytes], *, seed: int) -> None:
        random = np.random.default_rng(seed)
        stretches = [piece for content in files for piece in _stretches(content, random)]
        if not stretches:
            raise ValueError("there is no text to train on: all files are empty")
        ordered = [stretches[n] for n in random.permutation(len(stretches))]
        self._bytes: NDArray[np.uint8] = np.frombuffer(b"".join(ordered), np.uint8)
        self._ends = np.cumsum([len(x) for x in ordered])
        self.digest = hashlib.blake2b(self._bytes.tobytes(), digest_size=8).hexdigest()
        """Of all bytes in their order: two corpora with the same one give the same batches."""

    def __len__(self) -> int:
        return len(self._bytes)

    def batch(self, step: int, *, num_tokens: int) -> Batch:
        """Bytes [step * num_tokens, (step + 1) * num_tokens), of which no step has two."""
        start, end = step * num_tokens, (step + 1) * num_tokens
        if end > len(self):
            raise ValueError(
                f"step {step} of {num_tokens} tokens ends at byte {end:,}, but there are only "
                f"{len(self):,}: take fewer steps or fewer tokens"
            )
        tokens = torch.from_numpy(self._bytes[start:end].astype(np.int64))
        first, last = np.searchsorted(self._ends, [start, end], side="right")
        inside = self._ends[first:last] - start  # ends in (start, end]
        bounds = [0, *(int(x) for x in inside if x < num_tokens), num_tokens]
        targets = torch.cat([tokens[1:], tokens.new_tensor([NO_TARGET])])
        targets[torch.tensor(bounds[1:]) - 1] = NO_TARGET
        return Batch(tokens, targets, bounds)


def standard_library(*, seed: int) -> Corpus:
    """The modules of this Python that are written in Python, packages left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if not files:
        raise ValueError(
            f"Python's standard library is not there as .py files in {folder}: run a Python that "
            "was installed with them"
        )
    return Corpus(files, seed=seed)


def _stretches(content: bytes, random: np.random.Generator) -> list[bytes]:
    found, start = [], 0
    while start < len(content):
        end = start + int(random.integers(SHORTEST, LONGEST + 1))
        found.append(content[start:end])
        start = end
    return found
