"""What ranks run in the tests of QK-Clip. Imported by their processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from keel import masks
from keel.distributed import dispatch, varlen_key
from keel.nn import GPT, GPTConfig
from keel.optim import ClippedRows, LayerSpec, QKClip, grouped_rows, key_rows, query_rows

BOUNDS = [0, 9, 31, 48]


def make_gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "num_layers": 3, "hidden_size": 32, "num_heads": 4}
    return GPT(GPTConfig(**(sizes | {"num_kv_heads": 2, "qkv_bias": True} | changes)))


def collectives_of_a_step(rank: int) -> list[tuple[int, list[str]]]:
    """(layers, names of the collectives of one step), for models of several depths."""
    found = []
    for layers in (1, 3, 7):
        model = make_gpt(num_layers=layers)
        clip = QKClip.from_model(model, tau=0.5)
        model(torch.randint(32, (16,)), masks.causal(16))
        calls: list[str] = []
        with mock.patch.multiple(dist, **{name: _counted(name, calls) for name in _COLLECTIVES}):
            clip.step()
        found.append((layers, calls))
    return found


_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"),
    *("all_to_all", "all_to_all_single", "barrier", "reduce", "reduce_scatter_tensor", "gather"),
)


def _counted(name: str, calls: list[str]) -> Any:
    real = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(*args, **kwargs)

    return call


def train(rank: int, steps: int) -> dict[str, Any]:
    """Data parallel, each rank on tokens of its own; logits are driven up. Weights at the end."""
    model = make_gpt(num_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    clip = QKClip.from_model(model, tau=1.0)
    clip.attach(optimizer)
    own = torch.Generator().manual_seed(rank)
    clipped, alone = 0, 0
    for _ in range(steps):
        optimizer.zero_grad()
        ids = torch.randint(32, (12,), generator=own)
        model(ids, masks.causal(12)).log_softmax(-1)[:, 0].mean().backward()
        local = torch.cat([x.attention.current_max_attn_logits for x in model.layers])
        gradients = [x.grad for x in model.parameters()]
        together = torch.nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(together)
        torch.nn.utils.vector_to_parameters(together / dist.get_world_size(), gradients)
        optimizer.step()
        with torch.no_grad():
            for layer in model.layers:
                layer.attention.q_proj.weight *= 1.02
        assert clip.metrics is not None
        clipped += int(clip.metrics.clipped)
        alone += int((local < clip.metrics.max_logits).sum())
    weights = {name: x.detach().numpy() for name, x in model.named_parameters()}
    return {"weights": weights, "clipped": clipped, "raised by others": alone}


def check_context_parallel(rank: int) -> dict[str, float]:
    """Maxima and clipped weights of ranks that share a sequence, against one rank that has it."""
    errors = {}
    batches = torch.randint(32, (2, BOUNDS[-1]), generator=torch.Generator().manual_seed(3))
    for recompute in (False, True):
        one, many = make_gpt().double(), make_gpt(recompute=recompute).double()
        mask = masks.documents(BOUNDS, causal=True)
        want = QKClip.from_model(one, tau=0.5, group="local")
        got = QKClip.from_model(many, tau=0.5)
        key = varlen_key(BOUNDS, causal=True, balance="zigzag")
        for ids in batches:
            one(ids, mask).square().sum().backward()
            many(dispatch(ids, key), key).square().sum().backward()
        expected, found = want.step(), got.step()
        assert expected is not None and found is not None and expected.clipped > 0
        errors[f"max logits, {recompute}"] = _error(found.max_logits, expected.max_logits)
        for (name, x), y in zip(many.named_parameters(), one.parameters(), strict=True):
            errors[f"{name}, {recompute}"] = _error(x, y)
            dist.all_reduce(x.grad)
            assert x.grad is not None and y.grad is not None
            errors[f"gradient of {name}, {recompute}"] = _error(x.grad, y.grad)
    return errors


def _error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().max())


def check_nan_and_found_inf(rank: int) -> None:
    """What one rank alone knows stops all of them."""
    weight = torch.ones(4, 3)
    rows = (ClippedRows(weight, query_rows(2, 2), "wq"),)
    spec = LayerSpec(name="only", num_heads=2, num_kv_heads=1, rows=rows)
    clip = QKClip([spec], tau=1.0)
    clip.observe("only", torch.tensor([2.0, float("nan") if rank == 1 else 2.0]))
    metrics = clip.step()
    assert metrics is not None and metrics.nonfinite == 1
    assert weight[:, 0].tolist() == [0.5, 0.5, 1.0, 1.0]
    clip.observe("only", torch.tensor([2.0, 2.0]))
    metrics = clip.step(found_inf=torch.tensor(float(rank == 0)))
    assert metrics is not None and metrics.clipped == 0
    assert weight[:, 0].tolist() == [0.5, 0.5, 1.0, 1.0]
    clip.observe("only", torch.tensor([2.0, 1.0 + 3.0 * rank]))
    clip.step()
    assert weight[:, 0].tolist() == [0.25, 0.25, 0.25, 0.25]


class Attention(nn.Module):
    """Projections in three layouts; reports the maxima that it is told."""

    def __init__(self, heads: int, kv_heads: int, dim: int, fused: bool) -> None:
        super().__init__()
        self.shape = heads, kv_heads, dim
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(6, (heads + 2 * kv_heads) * dim)
        else:
            self.q = nn.Linear(6, heads * dim)
            self.k = nn.Linear(6, kv_heads * dim)
        self.current_max_attn_logits: torch.Tensor | None = None

    def spec(self, name: str) -> LayerSpec:
        heads, kv_heads, dim = self.shape
        if self.fused:
            rows = (ClippedRows(self.qkv, grouped_rows(heads, kv_heads, dim), "qkv"),)
        else:
            rows = (
                ClippedRows(self.q, query_rows(heads, dim), "q"),
                ClippedRows(self.k, key_rows(kv_heads, dim), "k"),
            )
        return LayerSpec(name=name, num_heads=heads, num_kv_heads=kv_heads, rows=rows, source=self)


def make_layers() -> nn.ModuleList:
    """GQA and MHA, shards that are even, uneven (5 heads of 3) and empty (1 head of 1)."""
    torch.manual_seed(0)
    shapes = [(4, 2, 8, False), (4, 4, 8, False), (5, 5, 3, False), (1, 1, 1, False)]
    shapes += [(4, 2, 8, True), (5, 5, 3, True)]
    return nn.ModuleList(Attention(*shape) for shape in shapes)


def tops_of(layers: nn.ModuleList, step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.rand(x.shape[0], generator=random) * 4 for x in layers]


def clip_all(layers: nn.ModuleList, gqa: Any, slices: Any = None, group: Any = "local") -> QKClip:
    clip = QKClip(
        [x.spec(f"layer {n}") for n, x in enumerate(layers)],
        tau=1.0,
        alpha=0.3,
        gqa=gqa,
        group=group,
    )
    for step in range(3):
        for layer, top in zip(layers, tops_of(layers, step), strict=True):
            layer.current_max_attn_logits = top if slices is None else slices(top)
        clip.step()
    return clip


def largest_error(sharded: nn.ModuleList, whole: nn.ModuleList) -> tuple[float, set[int]]:
    """Relative; and how many rows of a parameter ranks hold."""
    error, rows = 0.0, set()
    for (name, x), y in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(x, DTensor), name
        rows.add(x.to_local().shape[0])
        full = x.full_tensor()
        error = max(error, float(((full - y).abs() / y.abs().clamp_min(1e-3)).max()))
    return error, rows


MODES = ("q_only", "compensated", "group")


def in_each_mode(rank: int, check: str, *args: Any) -> dict[str, Any]:
    return {gqa: globals()[check](rank, gqa, *args) for gqa in MODES}


def check_fsdp(rank: int, gqa: str, late: bool) -> tuple[float, set[int]]:
    """FSDP2 over all ranks; `late`: the clip is made before the model is sharded."""
    whole, sharded = make_layers(), make_layers()
    clip_all(whole, gqa)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    specs = [x.spec(f"layer {n}") for n, x in enumerate(sharded)] if late else None
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    if specs is None:
        clip_all(sharded, gqa)
    else:
        clip = QKClip(specs, tau=1.0, alpha=0.3, gqa=gqa, group="local")  # type: ignore[arg-type]
        for step in range(3):
            for layer, top in zip(sharded, tops_of(sharded, step), strict=True):
                layer.current_max_attn_logits = top
            clip.step()
    return largest_error(sharded, whole)


def _parallel(layers: nn.ModuleList, mesh: DeviceMesh) -> nn.ModuleList:
    for layer in layers:
        plan = {name: ColwiseParallel() for name, _ in layer.named_children()}
        parallelize_module(layer, mesh, plan)  # type: ignore[arg-type]
    return layers


def _even() -> nn.ModuleList:
    """Layers whose heads two ranks can share."""
    torch.manual_seed(0)
    shapes = [(4, 2, 8, False), (4, 4, 5, False), (6, 2, 3, False), (4, 2, 8, True)]
    return nn.ModuleList(Attention(*shape) for shape in shapes)


def check_tp(rank: int, gqa: str) -> tuple[float, set[int], str]:
    """Each rank's attention knows its own heads alone."""
    whole, shared = _even(), _even()
    clip_all(whole, gqa)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    _parallel(shared, mesh)
    own = lambda top: top.chunk(2)[rank].clone()  # noqa: E731
    clip = clip_all(shared, gqa, own)
    counts = clip.state_dict()["layers"]["layer 1"]["clips"]
    assert len(counts) == 4 and (counts.chunk(2)[1 - rank] == 0).all() and counts.sum() > 0
    try:
        clip_all(shared, gqa, own, group=None)
        message = "nothing raised"
    except ValueError as error:
        message = str(error)
    return *largest_error(shared, whole), message


def check_fsdp_and_tp(rank: int, gqa: str) -> tuple[float, set[int]]:
    """Four ranks: two share the heads, and two of each share their rows."""
    whole, sharded = _even(), _even()
    clip_all(whole, gqa)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _parallel(sharded, mesh["tp"])
    for layer in sharded:
        fully_shard(layer, mesh=mesh["dp"])
    tp = mesh["tp"].get_local_rank()
    clip_all(sharded, gqa, lambda top: top.chunk(2)[tp].clone(), group=mesh["dp"])
    return largest_error(sharded, whole)


def check_sharded_training(rank: int) -> dict[str, float]:
    """A whole GPT under FSDP2, trained with the clip attached, against one process."""
    one, many = make_gpt(), make_gpt()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in many.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(many, mesh=mesh)
    clips = QKClip.from_model(one, tau=0.5, group="local"), QKClip.from_model(many, tau=0.5)
    for model, clip in zip((one, many), clips, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        clip.attach(optimizer)
        random = torch.Generator().manual_seed(0)
        for _ in range(4):
            ids = torch.randint(32, (16,), generator=random)
            optimizer.zero_grad()
            model(ids, masks.causal(16)).log_softmax(-1)[:, 3].mean().backward()
            optimizer.step()
        assert clip.metrics is not None and clip.metrics.clipped > 0
    errors = {}
    for (name, x), y in zip(many.named_parameters(), one.parameters(), strict=True):
        assert isinstance(x, DTensor)
        errors[name] = _error(x.full_tensor(), y)
    return errors
