"""The small GPT against the same computation written out, and what it keeps for QK-Clip."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from keel import masks
from keel.nn import GPT, GPTConfig

SIZES = {"vocab_size": 40, "num_layers": 2, "hidden_size": 32, "num_heads": 4}


def make(**changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(SIZES | changes))).double()
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 1:
                x.normal_(1.0, 0.3)
    return model


def by_hand(model: GPT, ids: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, max logits (layers, heads)) with complex numbers and a dense mask."""
    config = model.config
    weights = dict(model.named_parameters())
    x, tops = weights["embedding.weight"][ids], []
    half = torch.arange(config.dim // 2).float()
    angle = torch.arange(len(ids)).float()[:, None] * config.rope_base ** (-2 * half / config.dim)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)[:, None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        y = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([y.real, y.imag], -1)

    for n in range(config.num_layers):
        p = f"layers.{n}."
        y = norm(x, p + "attention_norm.weight")
        q, k, v = (
            F.linear(
                y,
                weights[f"{p}attention.{c}_proj.weight"],
                weights.get(f"{p}attention.{c}_proj.bias"),
            ).unflatten(1, (-1, config.dim))
            for c in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (z.repeat_interleave(config.num_heads // config.kv_heads, 1) for z in (k, v))
        s = torch.einsum("ihd,jhd->hij", q, k) / config.dim**0.5
        s = s.masked_fill(~seen, -torch.inf)
        tops.append(s.amax((1, 2)))
        out = torch.einsum("hij,jhd->ihd", s.softmax(-1), v).flatten(1)
        x = x + out @ weights[p + "attention.o_proj.weight"].T
        y = norm(x, p + "mlp_norm.weight")
        gate, up = (y @ weights[f"{p}mlp.{c}_proj.weight"].T for c in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[p + "mlp.down_proj.weight"].T
    return norm(x, "norm.weight") @ weights["head.weight"].T, torch.stack(tops)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2, "qkv_bias": True}, {"head_dim": 16}])
def test_as_written_out(changes: dict) -> None:
    model = make(**changes)
    ids = torch.randint(40, (21,))
    mask = masks.documents([0, 8, 21], causal=True)
    seen = torch.ones(21, 21).tril().bool()
    seen[8:, :8] = False
    want, tops = by_hand(model, ids, seen)
    torch.testing.assert_close(model(ids, mask), want, rtol=1e-6, atol=1e-6)
    got = torch.stack([x.attention.current_max_attn_logits for x in model.layers])
    torch.testing.assert_close(got, tops, rtol=1e-6, atol=1e-6)


def test_documents_do_not_see_each_other() -> None:
    model = make()
    one, two = torch.randint(40, (2, 9))
    apart = torch.cat([model(x, masks.causal(9)) for x in (one, two)])
    together = model(torch.cat([one, two]), masks.documents([0, 9, 18], causal=True))
    torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-5)  # positions differ by 9


def test_recomputing_gives_the_same_gradients() -> None:
    ids, mask = torch.randint(40, (12,)), masks.causal(12)
    grads = []
    for recompute in (False, True):
        model = make(recompute=recompute)
        model(ids, mask).square().mean().backward()
        grads.append([x.grad for x in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(40, (33,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:-1], masks.causal(32)), ids[1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 3 and losses[-1] < 0.2


def test_maxima_only_in_training_and_in_no_checkpoint() -> None:
    model = make().eval()
    model(torch.randint(40, (9,)), masks.causal(9))
    attention = model.layers[0].attention
    assert attention.current_max_attn_logits is None
    model.train()(torch.randint(40, (9,)), masks.causal(9))
    assert attention.current_max_attn_logits.isfinite().all()
    assert not [name for name in model.state_dict() if "max" in name]
    model.bfloat16()
    assert attention.current_max_attn_logits.dtype == torch.float64
    attention.reset_max_logits()
    assert (attention.current_max_attn_logits == -torch.inf).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "hidden_size=32 is not a multiple of num_heads=3"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"num_layers": 0}, "num_layers must be a positive int"),
        ({"head_dim": 12}, "a multiple of 8 channels, got 12"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a positive int"),
    ],
)
def test_bad_sizes(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(SIZES | changes))


def test_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens must be \(t,\), documents end to end"):
        make()(torch.randint(40, (2, 9)), masks.causal(9))
