"""QK-Clip as a callback of Lightning."""

from __future__ import annotations

from typing import Any

import torch

from keel.optim import MuonClip, QKClip

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"keel.integrations.lightning needs {missing.name}: pip install 'keel-attn[lightning]'",
        name=missing.name,
    ) from missing


class QKClipCallback(Callback):
    """Clips after each optimizer step, and logs the largest logit and how many heads were clipped.

    The clip is made when training starts, after the strategy has sharded the model. It acts behind
    the last optimizer. Where an optimizer is `MuonClip`, that one clips, and the callback logs.
    Steps that a gradient scaler skips are left out. How often each head was clipped is part of
    checkpoints.

    Args:
        name: what the logged names begin with: name/max_logit, name/clipped.
        options: of `QKClip.from_model`: tau, gqa, skip, qk_norm, group, every, ...

    >>> callback = QKClipCallback(tau=100.0)
    >>> callback.clip is None  # until trainer.fit(model)
    True
    """

    def __init__(self, *, name: str = "qk_clip", **options: Any) -> None:
        super().__init__()
        self.name, self.options = name, options
        self.clip: QKClip | None = None
        self._handles: list[Any] = []
        self._restored: dict[str, Any] | None = None
        self._waiting = False
        """Whether an optimizer step was announced that has not happened yet."""

    def on_train_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        self._end()
        optimizers = trainer.optimizers
        if not optimizers:
            raise ValueError("QKClipCallback clips after an optimizer's step, and there is none")
        own = [x for x in optimizers if isinstance(x, MuonClip)]
        if own and self.options:
            raise ValueError(
                f"MuonClip clips by itself, so {', '.join(self.options)} would be lost: pass them "
                "to MuonClip"
            )
        if own:
            self.clip = own[-1].clip
        else:
            self.clip = QKClip.from_model(pl_module, **self.options)
            self._handles.append(self.clip.attach(optimizers[-1]))
            if self._restored is not None:
                self.clip.load_state_dict(self._restored)
        self._restored = None
        last = own[-1] if own else optimizers[-1]
        self._handles.append(last.register_step_post_hook(self._stepped))

    def on_train_end(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: torch.nn.Module, exception: Any) -> None:
        self._end()

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: torch.nn.Module, optimizer: Any
    ) -> None:
        self._waiting = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.clip is not None
        if self._waiting:  # a gradient scaler found infinities
            self.clip.skip()
            self._waiting = False
        metrics = self.clip.metrics
        if metrics is not None:
            pl_module.log(f"{self.name}/max_logit", metrics.max_logits.max())
            pl_module.log(f"{self.name}/clipped", metrics.clipped.to(torch.float32))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.clip is None else self.clip.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict or None

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._waiting = False

    def _end(self) -> None:
        """Takes the hooks off: a second fit makes its own."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting = False
