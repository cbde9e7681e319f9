"""QK-Clip: after each optimizer step, heads whose logits grew past tau have their rows scaled down.

gamma = min(1, tau / S) with S a head's largest logit of the step, over all micro-batches and ranks.
Queries and keys of the head are scaled so that its logits shrink by gamma; forward, backward and
the optimizer's state stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from keel.optim.clip_models import find_layers
from keel.optim.clip_program import ClipProgram, MasterOf, main_param
from keel.optim.clip_specs import LayerSpec
from keel.optim.clip_table import MODES, Gqa
from keel.optim.logit_stats import Group, reduce_packed

Tensor = torch.Tensor
QkNorm = Literal["refuse", "gains"]


@dataclass(frozen=True, slots=True)
class ClipMetrics:
    """What a step saw and did, as tensors: reading them is up to the caller."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Heads of each layer on this rank; they stand end to end in the tensors."""
    max_logits: Tensor
    """(heads,): S over all micro-batches and ranks of the group; -inf where nothing was seen."""
    gamma: Tensor
    """(heads,): 1 where nothing was clipped."""

    @property
    def clipped(self) -> Tensor:
        """How many heads were clipped."""
        return (self.gamma < 1).sum()

    @property
    def nonfinite(self) -> Tensor:
        """How many heads had a NaN or infinite maximum, and were left alone for that."""
        return (~self.max_logits.isfinite()).sum()

    @property
    def nonpositive(self) -> Tensor:
        """How many heads had a finite maximum of at most 0: nothing to clip."""
        return (self.max_logits.isfinite() & (self.max_logits <= 0)).sum()

    def layers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(max_logits, gamma) by layer."""
        parts = (x.split(list(self.sizes)) for x in (self.max_logits, self.gamma))
        return dict(zip(self.names, zip(*parts, strict=True), strict=True))


class QKClip:
    """Clips a model's query and key projections by the max logits that its attention reported.

    Args:
        layers: `LayerSpec`s; `QKClip.from_model` finds them in models that it knows.
        tau: the largest logit that is left alone.
        alpha: the queries' share of a clip, gamma ** alpha, where each head has its own keys.
        gqa: where query heads share keys. "q_only": queries take the whole clip. "compensated":
            keys take gamma ** (1 - alpha) of the most clipped head, and queries what is left; both
            give each head exactly its own gamma. "group": all heads of a key head are clipped as
            the most clipped one, as Megatron does.
        group: ranks whose batches belong to one step: data times context parallel, and tensor
            parallel ranks where they hold the same heads. None: all ranks, where torch.distributed
            is initialised; "local": none.
        every: clip at each n-th step.
        master_of: from a parameter to its fp32 master, or None; the default looks for `main_param`.
            Masters are scaled, and the parameter's clipped rows rounded from them.

    A step makes one all-reduce, however many layers there are, and never waits for the device, but
    for the first one and after parameters moved. A head whose maximum is NaN, infinite or not
    positive is left alone; `metrics` has them.

    Steps that are skipped: GradScaler does not call the optimizer then, so call `skip()`; fused
    optimizers are called with a tensor `found_inf`, which is honoured.

    >>> from keel import masks
    >>> from keel.nn import GPT, GPTConfig
    >>> model = GPT(GPTConfig(vocab_size=256, num_layers=2, hidden_size=32, num_heads=4))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> clip = QKClip.from_model(model, tau=0.01)
    >>> handle = clip.attach(optimizer)
    >>> model(torch.arange(16), masks.causal(16)).square().mean().backward()
    >>> optimizer.step()  # and clips
    >>> clip.metrics.gamma.shape, int(clip.metrics.clipped)
    (torch.Size([8]), 8)
    """

    def __init__(
        self,
        layers: Iterable[LayerSpec],
        *,
        tau: float = 100.0,
        alpha: float = 0.5,
        gqa: Gqa = "q_only",
        group: Group = None,
        every: int = 1,
        master_of: MasterOf | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.tau = tau
        if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {alpha!r}")
        if gqa not in MODES:
            raise ValueError(f"gqa must be one of {', '.join(map(repr, MODES))}, got {gqa!r}")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive number of steps, got {every!r}")
        if not self.layers:
            raise ValueError("there are no layers to clip")
        self.alpha, self.gqa, self.group, self.every = float(alpha), gqa, group, every
        self.master_of = main_param if master_of is None else master_of
        self.metrics: ClipMetrics | None = None
        """Of the last step that clipped."""
        self._steps = 0
        self._specs = {spec.name: spec for spec in self.layers}
        if len(self._specs) < len(self.layers):
            raise ValueError(f"layers must have different names: {[x.name for x in self.layers]}")
        self._observed: dict[str, Tensor] = {}
        self._program: ClipProgram | None = None
        self._counts = _Counts(self.layers)

    @classmethod
    def from_model(
        cls,
        model: torch.nn.Module,
        *,
        qk_norm: QkNorm = "refuse",
        skip: Sequence[str] = (),
        **options: Any,
    ) -> QKClip:
        """Finds the attention of a model: Keel's own modules, and those of Hugging Face's Llama,
        Mistral, Qwen and DeepSeek, of Megatron and torchtitan, by their structure.

        Attention that it does not know is refused; `skip` names modules to leave out, with all that
        is in them. Frozen attention is left out, too. Behind a qk-norm the projections' scale is
        lost: such models are refused, or with qk_norm="gains" their norms' gains are scaled
        instead, all heads of a layer by its smallest gamma where they share a gain. `options` are
        those of QKClip.
        """
        if qk_norm not in get_args(QkNorm):
            raise ValueError(f"qk_norm must be 'refuse' or 'gains', got {qk_norm!r}")
        return cls(find_layers(model, scale_gains=qk_norm == "gains", skip=skip), **options)

    @property
    def tau(self) -> float:
        """The largest logit that is left alone; may be changed between steps."""
        return self._tau

    @tau.setter
    def tau(self, tau: float) -> None:
        if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0 < tau < math.inf:
            raise ValueError(f"tau must be a positive, finite logit, got {tau!r}")
        self._tau = float(tau)

    @property
    def due(self) -> bool:
        """Whether the next step will clip, so that its max logits are wanted."""
        return (self._steps + 1) % self.every == 0

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Clips after each `optimizer.step()`; returns a handle whose `remove()` ends that.

        Where several optimizers step, attach to the last one.
        """

        def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.step(found_inf=getattr(optimizer, "found_inf", None))

        return optimizer.register_step_post_hook(clip)

    @torch.no_grad()
    def observe(self, layer: str, max_logits: Tensor) -> None:
        """Raises a layer's running maximum by (..., heads) logits, from any attention."""
        spec = self._specs.get(layer)
        if spec is None:
            raise ValueError(f"no layer is called {layer!r}: {', '.join(self._specs)}")
        if spec.source is not None:
            raise ValueError(f"{layer} reports its max logits itself")
        if not max_logits.is_floating_point() or max_logits.ndim == 0:
            raise ValueError(
                f"max logits of {layer} must be floating point (..., heads), got "
                f"{max_logits.dtype} {tuple(max_logits.shape)}"
            )
        top = max_logits.detach().flatten(0, -2).amax(0) if max_logits.ndim > 1 else max_logits
        wide = torch.float64 if top.dtype == torch.float64 else torch.float32
        running = self._observed.get(layer)
        if running is None or running.device != top.device:
            self._observed[layer] = top.detach().to(wide, copy=True)
        elif running.shape != top.shape:
            raise ValueError(f"{layer} had {len(running)} heads so far, got {tuple(top.shape)}")
        else:
            torch.maximum(running, top.to(running.dtype), out=running)

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None, apply: bool = True) -> ClipMetrics | None:
        """Clips by what was reported since the last step, and forgets it. Ranks call it together.

        Args:
            found_inf: a tensor; where it is positive on any rank, the optimizer's step did not
                happen and nothing is clipped.
            apply: False: measure, and leave the weights alone.

        Returns:
            The metrics; None at steps between those that clip.
        """
        due, self._steps = self.due, self._steps + 1
        if not due:
            self._forget()
            return None
        tops = self._reported()
        program = self._program
        if program is None or not program.fits(tops):
            program = self._program = ClipProgram(
                *(self.layers, tops),
                alpha=self.alpha,
                gqa=self.gqa,
                group=self.group,
                master_of=self.master_of,
            )
            self._counts.follow(program)
        flag = program.zero
        if found_inf is not None:
            flag = (found_inf.detach().reshape(1) > 0).to(flag.device, torch.float32)
        packed = reduce_packed([*tops, flag], program.group)
        if program.packed is None:
            program.packed = torch.empty_like(packed)
        program.packed.copy_(packed)
        key = (self._tau, apply, *(x.data_ptr() for x in tops))
        tau = program.tau(self._tau)
        program.replay.run(key, lambda: self._clip(program, tops, tau, apply))
        gamma = program.factors.gammas.clone()  # the next step writes there
        self.metrics = ClipMetrics(program.names, program.sizes, packed[:-1], gamma)
        return self.metrics

    def _clip(self, program: ClipProgram, tops: list[Tensor], tau: Tensor, apply: bool) -> None:
        """What follows once maxima are known; the same launches at every step."""
        assert program.packed is not None
        top, skipped = program.packed[:-1], program.packed[-1:]
        gamma = program.factors.gammas
        if apply and program.in_one_launch and self._counts.are_all_here:
            from keel.kernels.clip_heads import clip_heads

            places, powers = program.factors.terms[0]
            state = {"gamma": gamma, "clips": self._counts.clips, "largest": self._counts.largest}
            factors = clip_heads(program.packed, tau, places=places, powers=powers, **state)
            program.scaler.scale(factors)
        else:
            _gamma(top, tau, skipped, program.one, out=gamma)
            if apply:
                program.scaler.scale(program.factors.now())
                self._counts.add(gamma, top)
        torch._foreach_copy_(tops, program.lowest)  # in place: captured graphs go on writing there

    @torch.no_grad()
    def skip(self) -> None:
        """Forgets what was reported, for a step that did not happen."""
        self._forget()

    def _forget(self) -> None:
        tops = self._reported(whatever=True)
        if tops:
            torch._foreach_copy_(tops, [torch.full_like(x, -torch.inf) for x in tops])

    def _reported(self, *, whatever: bool = False) -> list[Tensor]:
        found = []
        for spec in self.layers:
            if spec.source is None:
                top = self._observed.get(spec.name)
            else:
                top = getattr(spec.source, "current_max_attn_logits", None)
            if top is not None:
                found.append(top)
            elif not whatever:
                raise ValueError(f"{spec.name} never reported its max logits: {_why(spec)}")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Steps so far, and by layer how often each head was clipped and its largest logit."""
        layers = {
            name: {key: x.clone() for key, x in entry.items()}
            for name, entry in self._counts.by_layer().items()
        }
        return {"steps": self._steps, "layers": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        layers, mine = state["layers"], self._counts.by_layer()
        if layers.keys() != mine.keys():
            missing, extra = mine.keys() - layers.keys(), layers.keys() - mine.keys()
            raise ValueError(
                f"the state is of other layers: {sorted(missing)} are missing, {sorted(extra)} are "
                "not of this model"
            )
        for name, entry in mine.items():
            for key, x in entry.items():
                if layers[name][key].shape != x.shape:
                    raise ValueError(
                        f"the state of {name} is for {tuple(layers[name][key].shape)} heads, "
                        f"the layer has {len(x)}"
                    )
        for name, entry in mine.items():
            for key, x in entry.items():
                x.copy_(layers[name][key])
        self._steps = int(state["steps"])


class _Counts:
    """How often each head was clipped, and its largest logit: entries of the state, by layer.

    Made ahead of the first step, so that checkpoints have the same entries from the beginning.
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self.sizes = {spec.name: spec.num_heads for spec in layers}
        total = sum(self.sizes.values())
        self.clips = torch.zeros(total, dtype=torch.int64)
        self.largest = torch.full((total,), -torch.inf)
        self._places: Tensor | None = None

    def follow(self, program: ClipProgram) -> None:
        """Moves to a program's device and counts the heads that it knows."""
        self.clips, self.largest = (x.to(program.device) for x in (self.clips, self.largest))
        self._places = None
        if sum(program.sizes) < len(self.clips):
            places = [n for here in program.places for n in here]
            self._places = torch.tensor(places, device=program.device)

    @property
    def are_all_here(self) -> bool:
        """Whether every head is known to the program that is followed."""
        return self._places is None

    def add(self, gamma: Tensor, top: Tensor) -> None:
        clips, top = gamma < 1, top.to(self.largest.dtype)
        if self._places is None:
            self.clips += clips
            torch.fmax(self.largest, top, out=self.largest)
        else:
            self.clips[self._places] += clips
            self.largest[self._places] = torch.fmax(self.largest[self._places], top)

    def by_layer(self) -> dict[str, dict[str, Tensor]]:
        """Views, which may be written to."""
        sizes = list(self.sizes.values())
        parts = zip(self.clips.split(sizes), self.largest.split(sizes), strict=True)
        return {
            name: {"clips": clips, "largest": largest}
            for name, (clips, largest) in zip(self.sizes, parts, strict=True)
        }


def _gamma(top: Tensor, tau: Tensor, skipped: Tensor, one: Tensor, *, out: Tensor) -> None:
    """min(1, tau / top), and 1 where top is no positive number or the step was skipped.

    Few operations, since each is a launch. A quotient is 1 up to tau, NaN for NaN and 0 for
    infinity; the last two are not above 0, and nothing is above 1.
    """
    quotient = torch.div(tau, torch.maximum(top, tau))
    torch.where(quotient > skipped, quotient, one, out=out)


def _why(spec: LayerSpec) -> str:
    if spec.source is None:
        return "call observe(layer, max_logits) before the step"
    config = getattr(spec.source, "config", None)
    if getattr(config, "qk_clip", True) is False:
        return "its config has qk_clip=False"
    return "it did not run in training mode, or its kind of attention keeps no maxima"
