"""One run on one rank: steps, checkpoints, and what is measured on the way.

A step is a packed batch spread over the ranks, forward and backward with context parallelism, one
all-reduce for gradients and loss, the optimizer, and the clip. With a clip, the step's tokens then
go forward once more, to see what logits it has left.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from keel.distributed import AttnKey, dispatch, varlen_key
from keel.nn import GPT
from keel.nn.max_logits import KeepsMaxLogits
from keel.optim import ClipMetrics, Muon, MuonClip, QKClip
from keel.optim.muon_clip import sort_parameters
from keel.training import checkpoint
from keel.training.config import RUNS, TrainConfig
from keel.training.corpus import NO_TARGET, Batch, Corpus, standard_library

Report = Callable[[int, float, float, int], None]
"""(step, loss, largest logit, clipped heads) of a step that is done."""


class TrainingRun:
    """A model, its optimizer and its history, which are all that a checkpoint holds.

    Args:
        name: one of RUNS.
        device: of this rank; all ranks of the default group make the same run.
    """

    def __init__(
        self, name: str, config: TrainConfig, corpus: Corpus, device: torch.device
    ) -> None:
        self.name, self.config, self.corpus, self.device = name, config, corpus, device
        torch.manual_seed(config.seed)
        self.model = GPT(config.model_config()).to(device)
        self.optimizer, self.clip = make_optimizer(name, self.model, config)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        layers, heads = config.num_layers, config.num_heads
        self.history = {
            "loss": torch.full((config.steps,), torch.nan),
            "seen": torch.full((config.steps, layers, heads), torch.nan),
            "gamma": torch.full((config.steps, layers, heads), torch.nan),
            "left": torch.full((config.steps, layers), torch.nan),
        }
        """By step: mean loss; max logits of the forward; what the clip multiplied them with, or
        would have; with a clip, each layer's max logit of the same tokens after step and clip."""
        self.step = 0
        """Steps that are done; also where the corpus is read next."""

    def advance(self) -> None:
        """Makes one step, on all ranks together."""
        config, now = self.config, self.step
        batch = self.corpus.batch(now, num_tokens=config.tokens)
        key = varlen_key(batch.bounds, causal=True, balance="solver")
        tokens, targets = (dispatch(x.to(self.device), key) for x in (batch.tokens, batch.targets))
        self.optimizer.zero_grad()
        share = self._share_of_loss(tokens, targets, key, batch)
        share.backward()
        loss = self._reduce(share.detach())
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * config.rate(now)
        self.optimizer.step()
        metrics = self._metrics()
        shape = (config.num_layers, config.num_heads)
        self.history["loss"][now] = loss
        self.history["seen"][now] = metrics.max_logits.reshape(shape)
        self.history["gamma"][now] = metrics.gamma.reshape(shape)
        if isinstance(self.optimizer, MuonClip):
            self.history["left"][now] = self._logits_left(tokens, key)
        self.step += 1

    def _share_of_loss(
        self, tokens: torch.Tensor, targets: torch.Tensor, key: AttnKey, batch: Batch
    ) -> torch.Tensor:
        """Ranks' shares add up to the mean over all tokens that have a target."""
        logits = self.model(tokens, key)
        total = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")
        return total / max(batch.num_targets, 1)

    def _reduce(self, share: torch.Tensor) -> torch.Tensor:
        """Sums gradients over the ranks, in one piece with the loss, which it returns."""
        params = list(self.model.parameters())
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in params]
        packed = torch.cat([*(x.flatten() for x in grads), share.reshape(1)])
        dist.all_reduce(packed)
        pieces = packed[:-1].split([x.numel() for x in params])
        for param, piece in zip(params, pieces, strict=True):
            param.grad = piece.view_as(param)
        return packed[-1]

    def _metrics(self) -> ClipMetrics:
        """Of the step; a run without clip measures the same and leaves the weights alone."""
        if not isinstance(self.optimizer, MuonClip):
            self.clip.step(apply=False)
        assert self.clip.metrics is not None
        return self.clip.metrics

    @torch.no_grad()
    def _logits_left(self, tokens: torch.Tensor, key: AttnKey) -> torch.Tensor:
        """(layers,): the same tokens' max logits with the new weights."""
        self.model(tokens, key)
        tops = []
        for module in self.model.modules():
            if isinstance(module, KeepsMaxLogits):
                assert module.current_max_attn_logits is not None
                tops.append(module.current_max_attn_logits.max())
                module.reset_max_logits()  # they belong to no step of the clip
        top = torch.stack(tops)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        return top

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "clip": self.clip.state_dict(),
            "random": torch.get_rng_state(),
            "history": self.history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.clip.load_state_dict(state["clip"])
        torch.set_rng_state(state["random"])
        for name, x in self.history.items():
            x.copy_(state["history"][name])
        self.step = int(state["step"])

    def settings(self) -> dict[str, Any]:
        """All that the numbers depend on."""
        return {
            "run": self.name,
            **self.config.as_dict(),
            "text": self.corpus.digest,
            "device": self.device.type,
            "machine": platform.machine(),
            "torch": str(torch.__version__),
        }

    def digest(self) -> str:
        """Of weights, optimizer and history: equal where all bits are."""
        seen = hashlib.blake2b(digest_size=8)
        for path, x in _tensors("", self.state_dict()):
            seen.update(path.encode())
            seen.update(x.detach().cpu().contiguous().numpy().tobytes())
        return seen.hexdigest()


def make_optimizer(name: str, model: GPT, config: TrainConfig) -> tuple[Muon, QKClip]:
    """Muon, or MuonClip, for the same groups; and the clip, which for Muon only measures."""
    if name not in RUNS:
        raise ValueError(f"a run is one of {', '.join(RUNS)}, got {name!r}")
    # fp32: products in bf16 are slow on most CPUs. Ranks share the work of Newton-Schulz.
    options: dict[str, Any] = {
        "weight_decay": 0.0,
        "adjust_lr_fn": "original",
        "ns_dtype": torch.float32,
        "process_group": dist.group.WORLD,
    }
    if name == "muon_clip":
        both = MuonClip(model, config.lr, tau=config.tau, aux_lr=config.aux_lr, **options)
        return both, both.clip
    groups = sort_parameters(model, aux_lr=config.aux_lr, aux_weight_decay=0.0)
    return Muon(groups, config.lr, **options), QKClip.from_model(model, tau=config.tau)


def run_on_rank(
    name: str,
    config: TrainConfig,
    folder: Path,
    device: torch.device,
    report: Report,
    *,
    save_every: int,
) -> dict[str, Any]:
    """Trains from the run's checkpoint, if there is one, to the end; every rank calls it.

    Rank 0 writes; all ranks read. Returns the history and the digest.
    """
    path = folder / f"{name}.pt"
    run = TrainingRun(name, config, standard_library(seed=config.seed), device)
    needed = config.steps * config.tokens
    if needed > len(run.corpus):
        raise ValueError(
            f"{config.steps} steps of {config.tokens} tokens need {needed:,} bytes, but this "
            f"Python's standard library has {len(run.corpus):,}: take fewer steps or fewer tokens"
        )
    state = checkpoint.load(path)
    if state is not None:
        checkpoint.refuse_other_settings(state["settings"], run.settings(), path)
        run.load_state_dict(state)
        dist.barrier()  # nobody may still read when the first save comes
    while run.step < config.steps:
        run.advance()
        if dist.get_rank() == 0:
            done = run.step - 1
            top = float(run.history["seen"][done].max())
            clips = int((run.history["gamma"][done] < 1).sum())
            report(run.step, float(run.history["loss"][done]), top, clips)
            if run.step % save_every == 0 or run.step == config.steps:
                checkpoint.save(run.state_dict(), path)
    return {"history": run.history, "digest": run.digest()}


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{path}/{key}", inner)
