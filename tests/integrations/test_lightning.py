"""QK-Clip as a callback, in real trainings of Lightning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from keel import masks
from keel.integrations.lightning import QKClipCallback
from keel.nn import GPT, GPTConfig
from keel.optim import MuonClip, QKClip

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, TAU = 16, 0.5


class Module(pl.LightningModule):
    """Learns to say each token again; sgd with a rate of 0 leaves all to the clip."""

    def __init__(self, kind: str = "sgd", skips: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(GPTConfig(vocab_size=32, num_layers=2, hidden_size=32, num_heads=4))
        self.kind, self.skips = kind, skips
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        tokens = batch[0][0]
        logits = self.model(tokens, masks.causal(LENGTH))
        attention = self.model.layers[0].attention
        self.seen.append(attention.current_max_attn_logits.clone())
        return F.cross_entropy(logits, tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "muon":
            return MuonClip(self.model, lr=0.01, tau=TAU, ns_dtype=torch.float32)
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        if index not in self.skips:
            super().optimizer_step(epoch, index, optimizer, closure)
            return
        closure()  # as a gradient scaler does it when it finds infinities: announced, not made
        self.trainer.precision_plugin._after_closure(self, optimizer)


def fit(module: Module, callback: Any, folder: Path, steps: int, **options: Any) -> pl.Trainer:
    data = torch.utils.data.TensorDataset(
        torch.randint(32, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            callbacks=[callback],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{k: x for k, x in options.items() if k != "ckpt_path"},
        )
        trainer.fit(module, torch.utils.data.DataLoader(data), ckpt_path=options.get("ckpt_path"))
    return trainer


def after(module: Module, callback: QKClipCallback) -> torch.Tensor:
    """(layers, heads): how often each head was clipped."""
    assert callback.clip is not None
    layers = callback.clip.state_dict()["layers"].values()
    return torch.stack([x["clips"] for x in layers])


def test_clips_after_each_step_and_logs(tmp_path: Path) -> None:
    module, callback = Module(), QKClipCallback(tau=TAU)
    trainer = fit(module, callback, tmp_path, steps=1)
    top = module.seen[0]
    assert (top > TAU).any()
    logged = trainer.logged_metrics
    clips = after(module, callback)
    assert int(logged["qk_clip/clipped"]) == clips.sum() > 0
    assert torch.equal(clips[0].bool(), top > TAU)
    assert float(logged["qk_clip/max_logit"]) >= top.max()
    module.model(next(iter(trainer.train_dataloader))[0][0], masks.causal(LENGTH))
    again = module.model.layers[0].attention.current_max_attn_logits
    torch.testing.assert_close(again, top.clamp(max=TAU), rtol=1e-4, atol=1e-5)


def test_micro_batches_belong_to_one_step(tmp_path: Path) -> None:
    module, callback = Module(), QKClipCallback(tau=1e6)
    fit(module, callback, tmp_path, steps=2, accumulate_grad_batches=2)
    assert len(module.seen) == 4 and callback.clip is not None
    assert callback.clip.state_dict()["steps"] == 2
    assert (module.seen[1] >= module.seen[0]).all(), "the first of two was forgotten"
    assert not (module.seen[2] >= module.seen[1]).all(), "a step was not forgotten"


def test_skipped_steps_leave_nothing(tmp_path: Path) -> None:
    module, callback = Module(skips=(0, 1)), QKClipCallback(tau=TAU)
    fit(module, callback, tmp_path, steps=3)
    assert len(module.seen) == 3 and callback.clip is not None
    assert callback.clip.state_dict()["steps"] == 1
    alone = Module()
    alone.model(
        torch.randint(32, (8, LENGTH), generator=torch.Generator().manual_seed(0))[2],
        masks.causal(LENGTH),
    )
    torch.testing.assert_close(
        module.seen[2], alone.model.layers[0].attention.current_max_attn_logits
    )


def test_counts_are_part_of_checkpoints(tmp_path: Path) -> None:
    module, callback = Module(), QKClipCallback(tau=TAU)
    epoch = {"limit_train_batches": 2}  # Lightning begins an epoch anew
    trainer = fit(module, callback, tmp_path, steps=2, **epoch)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    clips = after(module, callback)
    other, resumed = Module(), QKClipCallback(tau=TAU)
    fit(other, resumed, tmp_path, steps=3, ckpt_path=tmp_path / "two.ckpt", **epoch)
    whole, once = Module(), QKClipCallback(tau=TAU)
    fit(whole, once, tmp_path, steps=3, **epoch)
    assert torch.equal(after(other, resumed), after(whole, once)) and clips.sum() > 0
    assert resumed.clip is not None and resumed.clip.state_dict()["steps"] == 3


def test_muon_clip_clips_by_itself(tmp_path: Path) -> None:
    module, callback = Module("muon"), QKClipCallback()
    trainer = fit(module, callback, tmp_path, steps=3)
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, MuonClip) and callback.clip is optimizer.clip
    assert optimizer.clip.state_dict()["steps"] == 3, "clipped twice a step"
    assert int(trainer.logged_metrics["qk_clip/clipped"]) == int(optimizer.metrics.clipped) > 0
    with pytest.raises(ValueError, match="tau would be lost"):
        fit(Module("muon"), QKClipCallback(tau=1.0), tmp_path, steps=1)


def test_a_second_fit_does_not_clip_twice(tmp_path: Path) -> None:
    callback = QKClipCallback(tau=TAU)
    for _ in range(2):
        module = Module()
        fit(module, callback, tmp_path, steps=1)
    assert isinstance(callback.clip, QKClip) and callback.clip.state_dict()["steps"] == 1
    assert not callback._handles
