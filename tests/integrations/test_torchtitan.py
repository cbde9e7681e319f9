"""Attention for torchtitan's models against torchtitan's own, and its max logits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from tests.integrations import torchtitan_cases
from tests.integrations.torchtitan_models import BOUNDS, DIM, VOCAB, batch, llama, maxima, run
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.models import deepseek_v3, gpt_oss
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, decoder
from torchtitan.models.common import attention as titan

from keel.integrations.torchtitan import KeelFlexAttention, KeelVarlenAttention
from keel.optim import MuonClip, QKClip
from keel.testing import run_ranks


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan compiles flex_attention and its masks, which takes minutes."""
    monkeypatch.setattr(titan.FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))
    monkeypatch.setattr(decoder, "create_attention_mask", create_block_mask)


def inits(std: float) -> dict[str, Any]:
    def normal(x: torch.Tensor) -> None:
        torch.nn.init.normal_(x, std=std)

    return dict.fromkeys(("weight", "bias", "sinks"), normal)


def documents(ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """(1, l) each."""
    for a, b in itertools.pairwise(BOUNDS):
        yield ids[:1, a:b]
    yield ids[1:]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_documents_are_as_alone_in_torchtitans_attention(backend: str, fused: bool) -> None:
    """Logits and gradients of packed documents against those of each by itself."""
    ids, positions = batch()
    ours, own = llama(backend, fused=fused), llama("sdpa", fused=fused)
    got = run(ours, ids, positions)
    alone = [own(x, torch.arange(x.shape[1])[None]) for x in documents(ids)]
    expected = torch.cat([x.flatten(0, 1) for x in alone])
    torch.testing.assert_close(got.flatten(0, 1), expected, rtol=1e-4, atol=1e-4)
    got.square().mean().backward()
    expected.square().mean().backward()
    gradients = [[x.grad for x in model.parameters()] for model in (ours, own)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    positions = torch.arange(BOUNDS[-1]).expand_as(ids)
    assert not torch.allclose(run(ours, ids, positions), got, atol=1e-2), "documents do nothing"


@torch.no_grad()
def test_flex_attention_of_torchtitan() -> None:
    ids, positions = batch()
    expected = run(llama("flex", keel=False), ids, positions)
    for backend in ("varlen", "flex"):
        got = run(llama(backend), ids, positions)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_windows_and_sinks_of_gpt_oss() -> None:
    found = {}
    _, positions = batch()
    x = torch.randn(2, BOUNDS[-1], DIM, generator=torch.Generator().manual_seed(0))
    for backend in ("flex", "varlen", "titan"):
        config = gpt_oss._make_gptoss_attn_config(
            dim=DIM,
            layer_id=0,
            attn_backend="flex" if backend == "titan" else backend,
            n_heads=4,
            n_kv_heads=2,
            head_dim=8,
            sliding_window_size=3,
            rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4),
        )
        inner = config.inner_attention
        if backend == "flex":
            config.inner_attention = KeelFlexAttention.Config()
        if backend == "varlen":
            config.inner_attention = KeelVarlenAttention.Config(window_size=inner.window_size)
        attention = config.build()
        random = torch.Generator().manual_seed(0)
        for weight in attention.parameters():
            weight.normal_(std=0.5, generator=random)
        if backend == "varlen":
            mask = titan.create_varlen_metadata_for_document(positions)
        else:
            mods = (
                titan.get_sliding_window_mask_mod(3),
                titan.get_document_mask_mod(positions),
            )
            mask = create_block_mask(
                lambda b, h, q, k, m=mods: m[0](b, h, q, k) & m[1](b, h, q, k),
                *(2, None, BOUNDS[-1], BOUNDS[-1], "cpu"),
            )
        found[backend] = attention(x, mask, positions)
    for backend in ("flex", "varlen"):
        torch.testing.assert_close(found[backend], found["titan"], rtol=1e-4, atol=1e-4)


def recorded(model: Any) -> list[list[Any]]:
    """(q, k) of each layer's inner attention, call by call."""
    calls: list[list[Any]] = []
    for layer in model.layers.values():
        calls.append([])
        layer.attention.inner_attention.register_forward_pre_hook(
            lambda module, args, mine=calls[-1]: mine.append(args[:2])
        )
    return calls


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_maxima_are_those_of_all_logits(backend: str) -> None:
    model = llama(backend)
    calls = recorded(model)
    for seed in (1, 2):  # two micro-batches: the larger of both stays
        ids, positions = batch(seed)
        run(model, ids, positions)
    document = (positions == 0).cumsum(1)
    hidden = (document[:, :, None] != document[:, None]) | torch.ones(24, 24).triu(1).bool()
    for of_layer, got in zip(calls, maxima(model), strict=True):
        tops = []
        for q, k in of_layer:
            scores = torch.einsum("blnh,bmnh->bnlm", q, k.repeat_interleave(2, 2)) * 8**-0.5
            tops.append(scores.masked_fill(hidden[:, None], -torch.inf).amax((0, 2, 3)))
        torch.testing.assert_close(got, torch.stack(tops).amax(0).detach(), rtol=1e-4, atol=1e-4)
    before = maxima(model)
    model.eval()
    run(model, *batch(3))
    assert all(map(torch.equal, maxima(model), before))


@pytest.mark.parametrize("fused", [True, False])
def test_clip_behind_torchtitans_optimizers(fused: bool) -> None:
    """Weights do not move, so the first layer's logits are scaled by exactly gamma."""
    model, inputs = llama("varlen", fused=fused), batch()
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.0})]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = config.build(model_parts=[model])
    run(model, *inputs).square().mean().backward()
    before = maxima(model)[0]
    tau = float(before.median())
    clip = QKClip.from_model(model, tau=tau)
    clip.attach(optimizers)
    optimizers.step()
    assert clip.metrics is not None and 0 < int(clip.metrics.clipped) < 8
    run(model, *inputs)
    torch.testing.assert_close(maxima(model)[0], before.clamp(max=tau), rtol=1e-4, atol=1e-4)


def mla(keel: bool = True) -> Any:
    config = deepseek_v3.make_mla_attention_config(
        layer_id=0,
        dim=DIM,
        n_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        attn_backend="flex",
        linear_init=inits(0.3),
        norm_init={"weight": torch.nn.init.ones_},
        depth_init=lambda _: inits(0.3),
        rope=ComplexRoPE.Config(dim=8, max_seq_len=64, theta=1e4),
    )
    kind = KeelVarlenAttention if keel else titan.ScaledDotProductAttention
    config.inner_attention = kind.Config()
    attention = config.build()
    torch.manual_seed(0)
    attention.init_states(buffer_device=torch.device("cpu"))
    return attention


def test_multi_latent_attention() -> None:
    x = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9).expand(2, 9)
    ours, own = mla(), mla(keel=False)
    metadata = titan.create_varlen_metadata_for_document(positions)
    got, expected = ours(x, metadata, positions), own(x, None, positions)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    before = ours.inner_attention.current_max_attn_logits.clone()
    tau = float(before.median())
    QKClip.from_model(ours, tau=tau).step()
    ours(x, metadata, positions)
    after = ours.inner_attention.current_max_attn_logits
    torch.testing.assert_close(after, before.clamp(max=tau), rtol=1e-4, atol=1e-4)


def test_compiled_blocks() -> None:
    """Whole blocks as one graph, as torchtitan compiles them."""
    model, inputs = llama("varlen"), batch()
    expected = run(model, *inputs)
    tops = maxima(model)
    model = llama("varlen")
    torch._dynamo.reset()
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    got = run(model, *inputs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(maxima(model), tops, rtol=1e-4, atol=1e-4)
    got.square().mean().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


def test_training_with_muon_clip() -> None:
    """A token is the one before it plus one."""
    model = llama("varlen")
    optimizer = MuonClip(model, lr=0.02, tau=1.0, ns_dtype=torch.float64)
    ids = (torch.arange(24) + torch.tensor([[0], [20]])) % VOCAB
    positions = batch()[1]
    losses, clipped = [], 0
    for _ in range(25):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            run(model, ids, positions).flatten(0, 1), ((ids + 1) % VOCAB).flatten()
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert optimizer.metrics is not None
        clipped += int(optimizer.metrics.clipped)
    assert losses[-1] < 0.5 * losses[0] and clipped > 10


def test_refuses_what_it_would_drop() -> None:
    q = torch.randn(1, 8, 4, 8)
    metadata = titan.create_varlen_metadata_for_document(torch.arange(8)[None])
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, "cpu")
    per_head = create_block_mask(lambda b, h, q, k: q >= k + h, None, 4, 8, 8, "cpu")
    varlen, flex = KeelVarlenAttention.Config().build(), KeelFlexAttention.Config().build()
    calls: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (TypeError, "takes VarlenMetadata, got BlockMask", varlen, {"attention_masks": blocks}),
        (TypeError, "takes a BlockMask, got VarlenM", flex, {"attention_masks": metadata}),
        (ValueError, "score_mod", flex, {"attention_masks": blocks, "score_mod": max}),
        (ValueError, "got bias", varlen, {"attention_masks": metadata, "bias": q}),
        (ValueError, r"for \(B, N, L, LK\) = \(1, 4", flex, {"attention_masks": per_head}),
    ]
    for kind, message, module, inputs in calls:
        with pytest.raises(kind, match=message):
            module(q, q, q, **inputs)
    with pytest.raises(ValueError, match="heads share one mask"):
        flex(q[:, :4], q[:, :4], q[:, :4], attention_masks=blocks)
    with pytest.raises(ValueError, match="kernel_options"):
        KeelFlexAttention.Config(kernel_options={"BACKEND": "FLASH"}).build()


def test_parallelisms_of_torchtitan() -> None:
    """Context parallelism: its wrapper gathers keys, its load balancer deals queries out.

    Then FSDP2, and tensor parallelism, with a clip. All as on one rank.
    """
    seen = []
    for (found, where, expected), sharded in run_ranks(torchtitan_cases.two_ranks, 2):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
        seen += where.tolist()
        for got, alone in (pair for pairs in sharded for pair in pairs):
            torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)
    assert sorted(seen) == list(range(torchtitan_cases.LENGTH)) and seen != sorted(seen)
