"""QKClip: after a clip the same tokens give gamma times the logits; and what it must not touch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from keel import flex_flash_attn_func, masks
from keel.nn import GPT, GPTConfig
from keel.optim import (
    ClippedRows,
    LayerSpec,
    QKClip,
    grouped_rows,
    interleaved_rows,
    key_rows,
    mla_key_rows,
    mla_query_rows,
    query_rows,
    stacked_rows,
)

INF = float("inf")
MASK = masks.documents([0, 9, 24], causal=True)


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_layers": 3, "hidden_size": 32, "num_heads": 4}
    model = GPT(GPTConfig(**(sizes | {"qkv_bias": True} | changes))).double()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias"):
                x.normal_()
    return model


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(64, (24,), generator=torch.Generator().manual_seed(seed))


def inputs_of(model: GPT, ids: torch.Tensor) -> list[tuple[Any, ...]]:
    """What each attention was called with: a clip changes later layers' inputs, too."""
    found: list[tuple[Any, ...]] = []
    hooks = [
        layer.attention.register_forward_pre_hook(lambda _, args: found.append(args))
        for layer in model.layers
    ]
    with torch.no_grad():
        model(ids, MASK)
    for hook in hooks:
        hook.remove()
    return found


def logits_of(model: GPT, inputs: list[tuple[Any, ...]]) -> torch.Tensor:
    """(layers, heads): max logits for the given inputs of each layer, computed anew."""
    tops = []
    for layer, args in zip(model.layers, inputs, strict=True):
        layer.attention.reset_max_logits()
        with torch.no_grad():
            layer.attention(*args)
        tops.append(layer.attention.current_max_attn_logits.clone())
        layer.attention.reset_max_logits()
    return torch.stack(tops)


@pytest.mark.parametrize("gqa", ["q_only", "compensated", "group"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_logits_shrink_by_gamma(kv_heads: int, gqa: Any, alpha: float) -> None:
    """With biases and rotary positions, in fp64: to rounding, and heads below tau stay."""
    model = gpt(num_kv_heads=kv_heads)
    inputs = inputs_of(model, tokens())
    before = logits_of(model, inputs)
    tau = float(before.median())
    clip = QKClip.from_model(model, tau=tau, alpha=alpha, gqa=gqa)
    model(tokens(), MASK)
    metrics = clip.step()
    assert metrics is not None
    gamma = metrics.gamma.view(3, 4)
    torch.testing.assert_close(metrics.max_logits.view(3, 4), before)
    torch.testing.assert_close(gamma, (tau / before).clamp(max=1.0))
    assert 0 < metrics.clipped < 12 and metrics.clipped == (before > tau).sum()
    wanted = gamma
    if gqa == "group" and kv_heads < 4:  # all heads of a key head as the most clipped of them
        shared = gamma.unflatten(1, (kv_heads, -1)).amin(2, keepdim=True)
        wanted = shared.expand(3, kv_heads, 4 // kv_heads).flatten(1)
    after = logits_of(model, inputs)
    torch.testing.assert_close(after, before * wanted, rtol=1e-10, atol=1e-10)
    assert (after <= tau * (1 + 1e-10)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_to_their_rounding(dtype: torch.dtype) -> None:
    model = gpt(num_kv_heads=2).to(dtype)
    model(tokens(), MASK)
    want = copy.deepcopy(model)
    clip = QKClip.from_model(model, tau=0.5)
    metrics = clip.step()
    assert metrics is not None and metrics.clipped > 0
    for layer, old, gamma in zip(model.layers, want.layers, metrics.gamma.split(4), strict=True):
        rows = gamma.repeat_interleave(8)
        for key in ("weight", "bias"):
            new, was = (getattr(x.attention.q_proj, key) for x in (layer, old))
            scaled = was.float() * rows.view(-1, *[1] * (was.ndim - 1))
            assert new.dtype == dtype and torch.equal(new, scaled.to(dtype))


def test_only_queries_and_keys_of_clipped_heads_change() -> None:
    model = gpt()
    old = copy.deepcopy(model.state_dict())
    clip = QKClip.from_model(
        model, tau=float(logits_of(model, inputs_of(model, tokens())).median())
    )
    model(tokens(), MASK)
    metrics = clip.step()
    assert metrics is not None
    for name, x in model.state_dict().items():
        if "q_proj" not in name and "k_proj" not in name:
            assert torch.equal(x, old[name]), name
            continue
        gamma = metrics.layers()[name.rsplit(".", 2)[0]][1]
        kept = (gamma == 1).repeat_interleave(8)
        assert torch.equal(x[kept], old[name][kept])
        assert kept.all() or not torch.equal(x[~kept], old[name][~kept])


def fused_layer(layout: str) -> tuple[Any, Any, Any, LayerSpec]:
    """The same q, k, v weights of 4 heads on 2 (per head: on 4), packed in one of the layouts."""
    torch.manual_seed(1)
    kv = 4 if layout == "interleaved" else 2
    q, k, v = (torch.randn(h, 8, 6, dtype=torch.float64) for h in (4, kv, kv))
    if layout == "stacked":
        packed, rows = torch.cat([q, k, v]), stacked_rows(4, 2, 8)
    elif layout == "interleaved":
        packed, rows = torch.stack([q, k, v], 1), interleaved_rows(4, 8)
    else:
        groups = q.unflatten(0, (2, 2))
        gate = [torch.randn_like(groups)] if layout == "gated" else []
        parts = [groups, *gate, k[:, None], v[:, None]]
        packed, rows = torch.cat(parts, 1), grouped_rows(4, 2, 8, gate=layout == "gated")
    weight = nn.Parameter(packed.reshape(-1, 6).clone())
    spec = LayerSpec(
        name="fused", num_heads=4, num_kv_heads=kv, rows=(ClippedRows(weight, rows, "qkv"),)
    )
    return q, k, v, spec


def unpack(weight: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if layout == "stacked":
        q, k, v = weight.view(-1, 8, 6).split([4, 2, 2])
    elif layout == "interleaved":
        q, k, v = weight.view(4, 3, 8, 6).unbind(1)
    else:
        per_group = weight.view(2, -1, 8, 6)
        q, k, v = per_group[:, :2].flatten(0, 1), per_group[:, -2], per_group[:, -1]
    return q, k, v


@pytest.mark.parametrize("gqa", ["q_only", "compensated", "group"])
@pytest.mark.parametrize("layout", ["stacked", "grouped", "gated", "interleaved"])
def test_fused_layouts_are_clipped_as_separate_ones(layout: str, gqa: Any) -> None:
    q, k, v, fused = fused_layer(layout)
    (packed,) = fused.rows
    separate = [nn.Parameter(x.flatten(0, 1).clone()) for x in (q, k)]
    spec = LayerSpec(
        name="separate",
        num_heads=4,
        num_kv_heads=len(k),
        rows=(
            ClippedRows(separate[0], query_rows(4, 8), "q"),
            ClippedRows(separate[1], key_rows(len(k), 8), "k"),
        ),
    )
    clip = QKClip([fused, spec], tau=1.0, alpha=0.3, gqa=gqa)
    for name in ("fused", "separate"):
        clip.observe(name, torch.tensor([2.0, 0.5, 4.0, 1.5], dtype=torch.float64))
    clip.step()
    got = unpack(packed.of.detach(), layout)  # type: ignore[union-attr]
    assert not torch.equal(got[0], q) and torch.equal(got[2], v)
    assert torch.equal(got[0], separate[0].view_as(q)) and torch.equal(
        got[1], separate[1].view_as(k)
    )
    rest = packed.of.detach().numel() - sum(x.numel() for x in (q, k, v))  # type: ignore[union-attr]
    assert rest == (4 * 8 * 6 if layout == "gated" else 0)


@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("rope", [8, 0])
def test_mla(alpha: float, rope: int) -> None:
    """Shared rotated keys and values stay; logits of each head shrink by its gamma."""
    torch.manual_seed(2)
    heads, nope, v_dim, rank, n = 3, 16, 8, 10, 20
    wq = nn.Linear(rank, heads * (nope + rope), bias=True).double()
    wkv = nn.Linear(rank, heads * (nope + v_dim), bias=True).double()
    x, c, shared = (torch.randn(n, w, dtype=torch.float64) for w in (rank, rank, max(rope, 1)))
    turn = torch.linalg.qr(torch.randn(rope, rope, dtype=torch.float64))[0]

    def tops() -> torch.Tensor:
        q = wq(x).view(n, heads, nope + rope)
        k_nope, v = wkv(c).view(n, heads, nope + v_dim).split([nope, v_dim], -1)
        q = torch.cat([q[..., :nope], q[..., nope:] @ turn], -1)
        k_rope = shared[:, None, :rope].expand(n, heads, rope)
        k = torch.cat([k_nope, k_rope], -1)
        _, meta = flex_flash_attn_func(q, k, v, masks.causal(n), return_max_logits=True)
        assert meta.max_logits is not None
        return meta.max_logits.detach()

    spec = LayerSpec(
        name="mla",
        num_heads=heads,
        num_kv_heads=heads,
        rows=(
            ClippedRows(wq, mla_query_rows(heads, nope, rope), "q_b_proj"),
            ClippedRows(wkv, mla_key_rows(heads, nope, v_dim), "kv_b_proj"),
        ),
    )
    before, kept = tops(), copy.deepcopy(wkv)
    tau = float(before.median())
    clip = QKClip([spec], tau=tau, alpha=alpha)
    clip.observe("mla", before)
    metrics = clip.step()
    assert metrics is not None and metrics.clipped == 1
    torch.testing.assert_close(tops(), before * metrics.gamma, rtol=1e-10, atol=1e-10)
    values = [w.weight.view(heads, nope + v_dim, rank)[:, nope:] for w in (wkv, kept)]
    assert torch.equal(*values)


def plain(**options: Any) -> tuple[torch.Tensor, QKClip]:
    """A weight of ones, 4 heads of 2 rows, and its clip."""
    weight = torch.ones(8, 3)
    rows = (
        ClippedRows(weight, query_rows(4, 2), "wq"),
        ClippedRows(torch.ones(4, 3), key_rows(2, 2), "wk"),
    )
    spec = LayerSpec(name="only", num_heads=4, num_kv_heads=2, rows=rows)
    return weight, QKClip([spec], **({"tau": 10.0} | options))


def test_nonfinite_and_nonpositive_maxima_touch_nothing() -> None:
    nan = float("nan")
    weight, clip = plain()
    for bad in ([nan, INF, -INF, -20.0], [0.0, -1e30, nan, 9.0]):
        clip.observe("only", torch.tensor(bad))
        metrics = clip.step()
        assert metrics is not None
        assert torch.equal(weight, torch.ones(8, 3))
        assert (metrics.gamma == 1).all() and metrics.clipped == 0
        assert metrics.nonfinite == sum(x != x or abs(x) == INF for x in bad)
        assert metrics.nonpositive == sum(-INF < x <= 0 for x in bad)
        torch.testing.assert_close(metrics.max_logits, torch.tensor(bad), equal_nan=True)
    clip.observe("only", torch.tensor([nan, 20.0, INF, 1.0]))  # a good head beside bad ones
    clip.step()
    assert torch.equal(weight[:, 0], torch.tensor([1, 1, 0.5, 0.5, 1, 1, 1, 1]))


def test_huge_maxima_leave_weights_finite() -> None:
    for gqa in ("q_only", "compensated", "group"):
        weight, clip = plain(tau=1e-6, gqa=gqa)
        clip.observe("only", torch.tensor([3e38, 1.0, 1.0, 1.0]))
        clip.step()
        assert weight.isfinite().all()


def test_micro_batches_are_one_step() -> None:
    weight, clip = plain()
    clip.observe("only", torch.tensor([20.0, 1.0, 1.0, 1.0]))
    clip.observe("only", torch.tensor([[5.0, 40.0, 1.0, 1.0], [1.0, 1.0, 1.0, -3.0]]))
    metrics = clip.step()
    assert metrics is not None
    assert metrics.max_logits.tolist() == [20.0, 40.0, 1.0, 1.0]
    assert weight[::2, 0].tolist() == [0.5, 0.25, 1.0, 1.0]
    metrics = clip.step()  # nothing was reported since
    assert metrics is not None and (metrics.max_logits == -INF).all()
    assert weight[::2, 0].tolist() == [0.5, 0.25, 1.0, 1.0]


def test_evaluation_does_not_count_and_recomputing_changes_nothing() -> None:
    seen = []
    for recompute in (False, True):
        model = gpt(recompute=recompute)
        clip = QKClip.from_model(model, tau=1.0)
        with torch.no_grad():
            for x in model.parameters():
                x *= 3
        model.eval()(tokens(1), MASK)
        with torch.no_grad():
            for x in model.parameters():
                x /= 3
        model.train()
        for seed in (0, 2):
            model(tokens(seed), MASK).square().mean().backward()
        metrics = clip.step()
        assert metrics is not None
        seen.append((metrics.max_logits, [x.detach() for x in model.parameters()]))
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(seen[0][1], seen[1][1], strict=True))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_attached_to_any_optimizer(kind: Any) -> None:
    """As stepping by hand; and after `remove` no more."""
    models = [gpt(), gpt()]
    optimizers = [kind(m.parameters(), lr=0.1) for m in models]
    clips = [QKClip.from_model(m, tau=1.0) for m in models]
    handle = clips[0].attach(optimizers[0])
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(tokens(step), MASK).square().mean().backward()
            optimizer.step()
        metrics = clips[1].step()
        assert metrics is not None and metrics.clipped > 0
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a, b)
    handle.remove()
    before = models[0].layers[0].attention.q_proj.weight.clone()
    optimizers[0].param_groups[0]["lr"] = 0.0
    optimizers[0].param_groups[0]["weight_decay"] = 0.0
    optimizers[0].step()
    assert torch.equal(models[0].layers[0].attention.q_proj.weight, before)


def test_the_optimizers_state_is_left_alone() -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(), MASK).square().mean().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    QKClip.from_model(model, tau=0.1).step()
    for number, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(x, state["state"][number][name]) for name, x in kept.items())


def test_skipped_steps_clip_nothing_and_forget() -> None:
    weight, clip = plain()
    top = torch.tensor([20.0, 40.0, 1.0, 1.0])
    clip.observe("only", top)
    metrics = clip.step(found_inf=torch.tensor(1.0))
    assert metrics is not None and (metrics.gamma == 1).all()
    assert torch.equal(metrics.max_logits, top) and torch.equal(weight, torch.ones(8, 3))
    clip.observe("only", top)
    clip.skip()
    clip.observe("only", top / 40)
    clip.step(found_inf=torch.tensor([0.0]))
    assert torch.equal(weight, torch.ones(8, 3))
    assert clip.state_dict()["layers"]["only"]["clips"].tolist() == [0, 0, 0, 0]
    clip.observe("only", top)
    clip.step(found_inf=torch.zeros(()))
    assert not torch.equal(weight, torch.ones(8, 3))


@pytest.mark.parametrize("fused", [True, False])
def test_under_a_grad_scaler(fused: bool) -> None:
    """It calls a fused optimizer with found_inf, and a plain one not at all: nothing is clipped."""
    weight, clip = plain()
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    clip.attach(optimizer)
    for factor, expected in ((INF, 1.0), (1.0, 0.5)):
        optimizer.zero_grad()
        clip.observe("only", torch.full((4,), 20.0))
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (parameter == 1.0).all() == (factor == INF)
        assert (weight == expected).all()


def test_measuring_alone() -> None:
    weight, clip = plain()
    clip.observe("only", torch.full((4,), 20.0))
    metrics = clip.step(apply=False)
    assert metrics is not None and metrics.clipped == 4
    assert torch.equal(weight, torch.ones(8, 3))


def test_every_third_step() -> None:
    weight, clip = plain(every=3)
    for number in range(1, 7):
        assert clip.due == (number % 3 == 0)
        if number != 4:  # what is not due need not be told; a third step takes its own maxima only
            clip.observe("only", torch.full((4,), 1000.0 if number % 3 else 20.0))
        metrics = clip.step()
        assert (metrics is not None) == (number % 3 == 0)
        assert (weight == 0.5 ** (number // 3)).all()


def test_masters_are_scaled_and_rounded_from() -> None:
    torch.manual_seed(0)
    master = torch.randn(8, 3)
    weight = nn.Parameter(master.bfloat16())
    kept = weight.detach().clone()
    spec = LayerSpec(
        name="only",
        num_heads=4,
        num_kv_heads=1,
        rows=(ClippedRows(weight, query_rows(4, 2), "wq"),),
    )
    weight.main_param = master  # type: ignore[attr-defined]
    clip, old = QKClip([spec], tau=10.0), master.clone()
    clip.observe("only", torch.tensor([30.0, 1.0, 70.0, 1.0]))
    clip.step()
    gamma = torch.tensor([10 / 30, 1.0, 10 / 70, 1.0]).repeat_interleave(2)[:, None]
    assert torch.equal(master, old * gamma)
    assert torch.equal(
        weight, master.bfloat16()
    )  # not bf16(gamma * bf16(w)), which is rounded twice
    assert not torch.equal(weight, (kept * gamma).bfloat16())
    with pytest.raises(ValueError, match=r"master of wq of only is \(24,\)"):
        other = QKClip([spec], tau=10.0, master_of=lambda _: torch.zeros(24))
        other.observe("only", torch.ones(4))
        other.step()


def test_state_survives_a_checkpoint(tmp_path: Any) -> None:
    _, clip = plain(every=2)
    for _ in range(3):
        clip.observe("only", torch.tensor([20.0, 1.0, 30.0, float("nan")]))
        clip.step()
    torch.save(clip.state_dict(), tmp_path / "clip.pt")
    _, other = plain(every=2)
    other.load_state_dict(torch.load(tmp_path / "clip.pt"))
    state = other.state_dict()
    assert state["steps"] == 3 and other.due
    assert state["layers"]["only"]["clips"].tolist() == [1, 0, 1, 0]
    assert state["layers"]["only"]["largest"].tolist() == [20.0, 1.0, 30.0, -INF]
    for one in (clip, other):
        one.observe("only", torch.tensor([20.0, 1.0, 1.0, 50.0]))
        one.step()
    assert str(clip.state_dict()) == str(other.state_dict())
    assert other.state_dict()["layers"]["only"]["clips"].tolist() == [2, 0, 1, 1]
    with pytest.raises(ValueError, match="other layers: \\['only'\\] are missing"):
        other.load_state_dict({"steps": 1, "layers": {}})
    wrong = {"steps": 1, "layers": {"only": {"clips": torch.zeros(3), "largest": torch.zeros(3)}}}
    with pytest.raises(ValueError, match=r"state of only is for \(3,\) heads, the layer has 4"):
        other.load_state_dict(wrong)


@pytest.mark.parametrize("replaced", [True, False])
def test_parameters_that_move_are_found_again(replaced: bool) -> None:
    model = gpt()
    clip = QKClip.from_model(model, tau=1.0)
    model(tokens(), MASK)
    clip.step()
    for layer in model.layers:
        projection = layer.attention.q_proj
        if replaced:  # a new parameter in the same memory, as when a module is sharded
            with torch.no_grad():
                projection.weight *= 64
            projection.bias = nn.Parameter(64 * projection.bias.detach())
            projection.weight = nn.Parameter(projection.weight.detach())
        else:
            for x in (projection.weight, projection.bias):
                x.data = x.data.clone() * 64
    inputs = inputs_of(model, tokens())
    before = logits_of(model, inputs)
    model(tokens(), MASK)
    assert clip.step() is not None and (before > 1).all()
    torch.testing.assert_close(logits_of(model, inputs), torch.ones_like(before))


def test_tau_may_change() -> None:
    weight, clip = plain()
    clip.tau = 40
    clip.observe("only", torch.full((4,), 80.0))
    clip.step()
    assert (weight == 0.5).all()
    clip.tau = 20  # and again, between steps
    clip.observe("only", torch.full((4,), 80.0))
    clip.step()
    assert (weight == 0.125).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 0}, "tau must be a positive, finite logit, got 0"),
        ({"tau": -1.0}, "tau must be"),
        ({"tau": INF}, "tau must be"),
        ({"tau": float("nan")}, "tau must be"),
        ({"alpha": 1.5}, "alpha must be in"),
        ({"gqa": "none"}, "gqa must be one of 'q_only', 'compensated', 'group', got 'none'"),
        ({"every": 0}, "every must be a positive"),
        ({"group": "world"}, "group must be a process group"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _, clip = plain(**options)
        clip.observe("only", torch.ones(4))
        clip.step()


def test_a_layer_that_never_reported_is_named() -> None:
    _, clip = plain()
    with pytest.raises(ValueError, match=r"only never reported its max logits: call observe"):
        clip.step()
    model = gpt()
    clip = QKClip.from_model(model)
    model.layers[0].attention(torch.randn(24, 32).double(), *inputs_of(model, tokens())[0][1:])
    model.layers[1].attention.current_max_attn_logits = None
    with pytest.raises(ValueError, match=r"layers.1.attention never reported"):
        clip.step()


def test_bad_observations() -> None:
    _, clip = plain()
    with pytest.raises(ValueError, match="no layer is called 'other': only"):
        clip.observe("other", torch.ones(4))
    with pytest.raises(ValueError, match="must be floating point"):
        clip.observe("only", torch.ones(4).int())
    clip.observe("only", torch.ones(4))
    with pytest.raises(ValueError, match="only had 4 heads so far"):
        clip.observe("only", torch.ones(3))
    _, clip = plain()
    clip.observe("only", torch.ones(3))
    with pytest.raises(ValueError, match="only reported max logits of 3 heads, but its parameters"):
        clip.step()
    model = gpt()
    with pytest.raises(ValueError, match=r"layers.0.attention reports its max logits itself"):
        QKClip.from_model(model).observe("layers.0.attention", torch.ones(4))


def test_a_tensor_in_two_layers_is_refused() -> None:
    model = gpt()
    model.layers[2].attention.k_proj = model.layers[0].attention.k_proj
    clip = QKClip.from_model(model)
    model(tokens(), MASK)
    with pytest.raises(ValueError, match=r"layers.2.attention.k_proj.weight .* clipped twice"):
        clip.step()


def test_layers_need_names_of_their_own() -> None:
    _, clip = plain()
    with pytest.raises(ValueError, match="different names"):
        QKClip([clip.layers[0], clip.layers[0]])
    with pytest.raises(ValueError, match="no layers"):
        QKClip([])
