"""QK-Clip: after each optimizer step, heads whose logits grew past tau have their rows scaled down.

gamma = min(1, tau / S) with S a head's largest logit of the step, over all micro-batches and ranks.
Queries and keys of the head are scaled so that its logits shrink by gamma; forward, backward and
the optimizer's state stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import DTensor

from keel.optim.clip_models import find_layers
from keel.optim.clip_specs import LayerSpec, Role
from keel.optim.clip_table import MODES, ClipTable, Factors, Gqa
from keel.optim.local_rows import local_tensor, row_stages
from keel.optim.logit_stats import Group, group_of, lowest_like, reduce_packed
from keel.optim.row_scaling import RowScaler, ScaledTensor

Tensor = torch.Tensor
MasterOf = Callable[[Tensor], Tensor | None]
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
        self.master_of = _main_param if master_of is None else master_of
        self.metrics: ClipMetrics | None = None
        """Of the last step that clipped."""
        self._steps = 0
        self._specs = {spec.name: spec for spec in self.layers}
        if len(self._specs) < len(self.layers):
            raise ValueError(f"layers must have different names: {[x.name for x in self.layers]}")
        self._observed: dict[str, Tensor] = {}
        self._program: _Program | None = None
        # Made ahead, so that checkpoints have the same entries from the beginning.
        self._clips = {x.name: torch.zeros(x.num_heads, dtype=torch.int64) for x in self.layers}
        self._largest = {x.name: torch.full((x.num_heads,), -torch.inf) for x in self.layers}

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

        Attention that it does not know is refused; `skip` leaves modules out whose name begins with
        one of its entries. Behind a qk-norm the projections' scale is lost: such models are
        refused, or with qk_norm="gains" their norms' gains are scaled instead, all heads of a layer
        by its smallest gamma where they share a gain. `options` are those of QKClip.
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
    def step(
        self, *, found_inf: Tensor | None = None, apply: bool = True
    ) -> ClipMetrics | None:
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
            program = self._program = _Program(self, tops)
        flag = program.zero
        if found_inf is not None:
            flag = (found_inf.detach().reshape(1) > 0).to(flag.device, torch.float32)
        packed = reduce_packed([*tops, flag], program.group)
        top = packed[:-1]
        gamma = _gamma(top, self._tau, skipped=packed[-1:])
        if apply:
            program.scaler.scale(program.factors.of(gamma))
            program.count(gamma, top)
        torch._foreach_copy_(tops, program.lowest)  # in place: captured graphs go on writing there
        self.metrics = ClipMetrics(program.names, program.sizes, top, gamma)
        return self.metrics

    @torch.no_grad()
    def skip(self) -> None:
        """Forgets what was reported, for a step that did not happen."""
        self._forget()

    def _forget(self) -> None:
        tops = self._reported(whatever=True)
        if tops:
            torch._foreach_copy_(tops, lowest_like(tops))

    def _reported(self, *, whatever: bool = False) -> list[Tensor]:
        found = []
        for spec in self.layers:
            if spec.source is None:
                top = self._observed.get(spec.name)
            else:
                top = spec.source.current_max_attn_logits
            if top is not None:
                found.append(top)
            elif not whatever:
                raise ValueError(f"{spec.name} never reported its max logits: {_why(spec)}")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Steps so far, and for each layer how often each head was clipped and its largest logit."""
        return {
            "steps": self._steps,
            "layers": {
                name: {"clips": self._clips[name].clone(), "largest": self._largest[name].clone()}
                for name in self._specs
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        layers = state["layers"]
        if layers.keys() != self._specs.keys():
            missing, extra = self._specs.keys() - layers.keys(), layers.keys() - self._specs.keys()
            raise ValueError(
                f"the state is of other layers: {sorted(missing)} are missing, {sorted(extra)} are "
                "not of this model"
            )
        for name, spec in self._specs.items():
            for key, mine in (("clips", self._clips), ("largest", self._largest)):
                if layers[name][key].shape != (spec.num_heads,):
                    raise ValueError(
                        f"the state of {name} is for {tuple(layers[name][key].shape)} heads, "
                        f"the layer has {spec.num_heads}"
                    )
                mine[name].copy_(layers[name][key])
        self._steps = int(state["steps"])


class _Program:
    """All that a step needs beside its numbers: worked out once for parameters where they are."""

    def __init__(self, clip: QKClip, tops: list[Tensor]) -> None:
        self.names = tuple(spec.name for spec in clip.layers)
        self.sizes = tuple(len(top) for top in tops)
        device, dtype = tops[0].device, torch.float32
        for top in tops:
            dtype = torch.promote_types(dtype, top.dtype)
        self.group = group_of(clip.group)
        self.zero = torch.zeros(1, device=device)
        self._tops, self.lowest = tops, lowest_like(tops)
        self._watched: list[tuple[dict[str, Any], str, Any, bool, int]] = []
        self._owners: dict[int, str] = {}
        table = ClipTable(clip.alpha, clip.gqa, sum(self.sizes))
        parts: list[ScaledTensor] = []
        places: list[range] = []
        first_gamma = first_place = 0
        for spec, top in zip(clip.layers, tops, strict=True):
            if top.device != device:
                raise ValueError(
                    f"{spec.name} reported from {top.device}, {clip.layers[0].name} from {device}: "
                    "layers of one QKClip share a device"
                )
            heads = _heads_here(spec, len(top), clip.group)
            kv_heads = _kv_heads_here(spec, heads)
            parts += self._parts(spec, table, first_gamma, heads, kv_heads, clip.master_of, device)
            places.append(range(first_place + heads.start, first_place + heads.stop))
            first_gamma += len(heads)
            first_place += spec.num_heads
        self.factors: Factors = table.on(device, dtype)
        self.scaler = RowScaler(parts, device)
        self._keep_counters(clip, places, device)

    def _parts(
        self,
        spec: LayerSpec,
        table: ClipTable,
        first_gamma: int,
        heads: range,
        kv_heads: range,
        master_of: MasterOf,
        device: torch.device,
    ) -> Iterable[ScaledTensor]:
        for part in spec.rows:
            entries = table.rows_of(
                part.layout, first_gamma=first_gamma, heads=heads, kv_heads=kv_heads
            )
            for name, holder, key in part.tensors():
                parameter, name = holder[key], f"{name} of {spec.name}"
                other = self._owners.setdefault(id(parameter), name)
                if other != name:
                    raise ValueError(f"{name} is {other}: one tensor cannot be clipped twice")
                if parameter.shape[0] != len(entries):
                    raise ValueError(
                        f"{name} has {parameter.shape[0]} rows now, its layout {len(entries)}"
                    )
                first, last = row_stages(parameter, name)[-1]
                mine, local = entries[first:last], local_tensor(parameter)
                if (mine < 0).any():
                    raise ValueError(
                        f"this rank holds rows of {name} whose heads it has no max logits of: it "
                        f"reported heads {heads.start} to {heads.stop - 1} of {spec.num_heads}"
                    )
                if local.device != device:
                    raise ValueError(
                        f"{name} is on {local.device}, its max logits on {device}: move one of them"
                    )
                sharded = isinstance(parameter, DTensor)
                self._watched.append((holder, key, parameter, sharded, local.data_ptr()))
                yield ScaledTensor(local, mine, _master(parameter, local, master_of, name))

    def _keep_counters(self, clip: QKClip, places: list[range], device: torch.device) -> None:
        """Counters of all layers as one tensor each; the state's entries become views of them."""
        sizes = [spec.num_heads for spec in clip.layers]
        self._clips, self._largest = (
            torch.cat([x.to(device) for x in kept.values()])
            for kept in (clip._clips, clip._largest)
        )
        clip._clips = dict(zip(self.names, self._clips.split(sizes), strict=True))
        clip._largest = dict(zip(self.names, self._largest.split(sizes), strict=True))
        self._places = None
        if any(len(here) != size for here, size in zip(places, sizes, strict=True)):
            self._places = torch.tensor([n for here in places for n in here], device=device)

    def fits(self, tops: list[Tensor]) -> bool:
        """Whether parameters and maxima are still where and what they were."""
        if not all(
            holder.get(key) is parameter
            and (parameter._local_tensor if sharded else parameter).data_ptr() == pointer
            for holder, key, parameter, sharded, pointer in self._watched
        ):
            return False
        return all(
            x is y or (x.shape == y.shape and x.device == y.device and x.dtype == y.dtype)
            for x, y in zip(tops, self._tops, strict=True)
        )

    def count(self, gamma: Tensor, top: Tensor) -> None:
        clips = gamma < 1
        top = top.to(self._largest.dtype)
        if self._places is None:
            self._clips += clips
            torch.fmax(self._largest, top, out=self._largest)
        else:
            self._clips[self._places] += clips
            self._largest[self._places] = torch.fmax(self._largest[self._places], top)


def _gamma(top: Tensor, tau: float, skipped: Tensor) -> Tensor:
    """min(1, tau / top), and 1 where top is no positive number or the step was skipped.

    Few operations, since each is a launch. A quotient is 1 up to tau, NaN for NaN and 0 for
    infinity; the last two are not above 0, and nothing is above 1.
    """
    quotient = torch.div(torch.tensor(tau, dtype=top.dtype), top.clamp_min(tau))
    return torch.where(quotient > skipped, quotient, 1.0)


def _heads_here(spec: LayerSpec, count: int, group: Group) -> range:
    """Which of the layer's heads this rank's attention reported."""
    if count == spec.num_heads:
        return range(count)
    for part in spec.rows:
        for name, holder, key in part.tensors():
            total = holder[key].shape[0]
            for first, last in row_stages(holder[key], name):
                if (last - first) * spec.num_heads == count * total:
                    if group is None:
                        raise ValueError(
                            f"{spec.name} has its heads spread over ranks: pass the group of ranks "
                            "that hold the same heads (data times context parallel)"
                        )
                    start = first * spec.num_heads // total
                    return range(start, start + count)
    raise ValueError(
        f"{spec.name} reported max logits of {count} heads, but its parameters have "
        f"{spec.num_heads} and are not sharded accordingly"
    )


def _kv_heads_here(spec: LayerSpec, heads: range) -> range:
    group = spec.num_heads // spec.num_kv_heads
    if len(heads) != spec.num_heads:
        if heads.start % group or heads.stop % group:
            raise ValueError(
                f"{spec.name}: query heads {heads.start} to {heads.stop - 1} of this rank cut "
                f"through groups of {group} that share keys"
            )
        if any(b.role in (Role.LAYER_Q, Role.LAYER_K) for p in spec.rows for b in p.layout):
            raise ValueError(
                f"{spec.name}: all heads share a gain, but this rank knows only some of them"
            )
    return range(heads.start // group, heads.stop // group)


def _main_param(parameter: Tensor) -> Tensor | None:
    """Megatron keeps a parameter's fp32 master there."""
    return getattr(parameter, "main_param", None)


def _master(parameter: Tensor, local: Tensor, master_of: MasterOf, name: str) -> Tensor | None:
    master = master_of(parameter)
    if master is None or master is parameter:
        return None
    found = local_tensor(master)
    if found.shape != local.shape or found.device != local.device:
        raise ValueError(
            f"the master of {name} is {tuple(found.shape)} on {found.device}, expected the rows "
            f"that this rank holds, {tuple(local.shape)} on {local.device}; flat shards of a "
            "distributed optimizer are not supported"
        )
    return found


def _why(spec: LayerSpec) -> str:
    if spec.source is None:
        return "call observe(layer, max_logits) before the step"
    config = getattr(spec.source, "config", None)
    if getattr(config, "qk_clip", True) is False:
        return "its config has qk_clip=False"
    return "it did not run in training mode, or its kind of attention keeps no maxima"
