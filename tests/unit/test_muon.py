"""Muon against torch.optim.Muon, step by step, and its own options against plain arithmetic."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from keel.optim import Muon, orthogonalize

SHAPES = [(16, 16), (12, 20), (20, 12), (1, 8), (12, 20)]
OPTIONS = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "lr": 3e-3},
    {"adjust_lr_fn": "original", "weight_decay": 0.0, "momentum": 0.5},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 1.0},
    {"lr": torch.tensor(2e-3)},
]


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def give_gradients(*lists: list[torch.nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape).to(same[0].dtype)
        for param in same:
            param.grad = grad.clone()


@pytest.fixture
def torch_in_fp32(monkeypatch):
    """torch.optim.Muon rounds to bf16 whatever its parameters are; here it stays in fp32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.float().clone())


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_steps_of_torch_in_fp32(options, torch_in_fp32):
    ours, theirs = parameters(), parameters()
    keels = Muon(ours, ns_dtype=torch.float32, **options)
    torchs = torch.optim.Muon(theirs, **options)
    for step in range(12):
        give_gradients(ours, theirs, seed=step)
        keels.step()
        torchs.step()
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() < 1e-6, f"step {step}, shape {tuple(a.shape)}"
            mine, other = (o.state[p]["momentum_buffer"] for o, p in ((keels, a), (torchs, b)))
            assert torch.equal(mine, other)


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_steps_of_torch_as_it_comes(options):
    """fp32 parameters and torch's bf16 Newton-Schulz: equal, not only near."""
    ours, theirs = parameters(), parameters()
    keels, torchs = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(5):
        give_gradients(ours, theirs, seed=step)
        keels.step()
        torchs.step()
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() < 1e-6, f"step {step}, shape {tuple(a.shape)}"


def test_bf16_parameters_keep_their_momentum():
    """Normalising must not write into the momentum, which is what is orthogonalised here."""
    (param,) = parameters(torch.bfloat16, [(8, 8)])
    optimizer = Muon([param], nesterov=False, momentum=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
    assert (optimizer.state[param]["momentum_buffer"] == 0.75).all()


def step_of(param: torch.Tensor, grad: torch.Tensor, **options) -> torch.Tensor:
    """What one step without decay and momentum takes off."""
    param = torch.nn.Parameter(param.clone())
    param.grad = grad.clone()
    before = param.detach().clone()
    defaults = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "ns_dtype": torch.float32}
    Muon([param], **(defaults | options)).step()
    return before - param.detach()


def test_stacked_matrices_are_each_their_own():
    torch.manual_seed(1)
    grad = torch.randn(2, 3, 12, 8)
    grad[0, 1] *= 1e4
    got = step_of(torch.zeros(2, 3, 12, 8), grad)
    for i, j in itertools.product(range(2), range(3)):
        assert torch.allclose(got[i, j], step_of(torch.zeros(12, 8), grad[i, j]), atol=1e-6)


@pytest.mark.parametrize("how", [None, "match_rms_adamw"])
def test_heads_and_splits_are_separate_matrices(how):
    """With the step of their own shape: fused [q|k|v] trains as three projections would."""
    torch.manual_seed(2)
    grad = torch.randn(24, 10)
    grad[8:] *= 100
    for options, sizes in (
        ({"num_heads": 3}, (8, 8, 8)),
        ({"split_sizes": (12, 8, 4)}, (12, 8, 4)),
        ({"split_sizes": [8, 8, 8]}, (8, 8, 8)),
    ):
        got = step_of(torch.zeros(24, 10), grad, adjust_lr_fn=how, **options)
        parts = grad.split(list(sizes))
        want = [step_of(torch.zeros_like(g), g, adjust_lr_fn=how) for g in parts]
        assert torch.allclose(got, torch.cat(want), atol=1e-6)
    stacked = step_of(torch.zeros(2, 24, 10), torch.stack([grad, -grad]), split_sizes=(16, 8))
    flat = step_of(torch.zeros(24, 10), grad, split_sizes=(16, 8))
    assert torch.allclose(stacked, torch.stack([flat, -flat]), atol=1e-6)


@pytest.mark.parametrize("name", ["quintic_tuned", "polar_express"])
def test_coefficient_sets_by_name_or_step(name):
    from keel.optim.coefficients import resolve_coefficients

    torch.manual_seed(3)
    grad = torch.randn(12, 12)
    got = step_of(torch.zeros(12, 12), grad, ns_coefficients=name)
    want = orthogonalize(grad, coefficients=name, dtype=torch.float32)
    assert torch.allclose(got, want, atol=1e-6)
    triples = resolve_coefficients(name, 5)
    assert torch.equal(step_of(torch.zeros(12, 12), grad, ns_coefficients=triples), got)


def test_adamw_groups_are_torchs_adamw():
    shapes = [(8,), (6, 4), ()]
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    (matrix,) = parameters(shapes=[(4, 4)])
    options = {"lr": 3e-3, "weight_decay": 0.2}
    groups = [{"params": [matrix]}, {"params": ours, "use_muon": False}]
    keels = Muon(groups, adamw_betas=(0.8, 0.9), adamw_eps=1e-6, **options)
    torchs = torch.optim.AdamW(theirs, betas=(0.8, 0.9), eps=1e-6, foreach=True, **options)
    for step in range(6):
        give_gradients(ours, theirs, seed=step)
        keels.step()
        torchs.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_groups_have_their_own_options():
    a, b = parameters(shapes=[(6, 6), (6, 6)])
    start = a.detach().clone()
    with torch.no_grad():
        b.copy_(a)
    fast = {"params": [b], "lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
    optimizer = Muon([{"params": [a]}, fast], lr=0.0, ns_dtype=torch.float32)
    a.grad = b.grad = torch.eye(6)
    optimizer.step()
    assert torch.equal(a, start)
    step = 0.1 * 0.2 * 6**0.5 * orthogonalize(torch.eye(6), dtype=torch.float32)
    assert torch.allclose(start - b, step, atol=1e-6)


def test_options_may_change_between_steps():
    (param,) = parameters(shapes=[(8, 8)])
    optimizer = Muon([param], ns_dtype=torch.float32, momentum=0.0, weight_decay=0.0, lr=1.0)
    for options in ({"num_heads": 2}, {"ns_steps": 3}, {"num_heads": None}, {"lr": 0.5}):
        optimizer.param_groups[0].update(options)
        group = optimizer.param_groups[0]
        param.grad = torch.randn(8, 8)
        before = param.detach().clone()
        optimizer.step()
        chosen = {key: group[key] for key in ("num_heads", "ns_steps", "lr")}
        assert torch.allclose(before - param, step_of(before, param.grad, **chosen), atol=1e-6)
    optimizer.param_groups[0]["num_heads"] = 3
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*3 heads do not divide"):
        optimizer.step()


def test_parameters_without_gradient_are_left_alone():
    params = parameters(shapes=[(4, 4), (4, 4), (4, 4), (0, 4)])
    params[2].requires_grad_(False)
    before = [p.detach().clone() for p in params]
    optimizer = Muon(params, weight_decay=0.5)
    params[0].grad, params[3].grad = torch.ones(4, 4), torch.ones(0, 4)
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    for i in (1, 2):
        assert torch.equal(params[i], before[i])
        assert not optimizer.state[params[i]]["momentum_buffer"].any()
    optimizer.zero_grad()
    optimizer.step()  # nobody has one


def test_closure_and_hooks():
    (param,) = parameters(shapes=[(4, 4)])
    optimizer = Muon([param])
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(True))

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] and len(called) == 3


def trained(optimizer: Muon, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(params, seed=step)
        optimizer.step()


def test_state_is_there_from_the_start_and_survives():
    def fresh():
        params = parameters(shapes=[(8, 6), (3, 4, 4), (5,)])
        groups = [
            {"params": params[:2], "ns_coefficients": "polar_express"},
            {"params": params[2:], "use_muon": False},
        ]
        return params, Muon(groups, lr=0.01)

    params, optimizer = fresh()
    assert set(optimizer.state_dict()["state"]) == {0, 1, 2}
    trained(optimizer, params, range(4))
    others, resumed = fresh()
    for a, b in zip(others, params, strict=True):
        a.data.copy_(b)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    trained(optimizer, params, range(4, 7))
    trained(resumed, others, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_copies_go_on_alone():
    (param,) = parameters(shapes=[(4, 4)])
    optimizer = Muon([param], ns_dtype=torch.float32)
    trained(optimizer, [param], range(2))
    copied, other = copy.deepcopy((optimizer, [param]))
    trained(optimizer, [param], range(2, 4))
    trained(copied, other, range(2, 4))
    assert torch.equal(param, other[0]) and param is not other[0]


def test_a_state_of_torchs_muon_is_taken():
    ours, theirs = parameters(), parameters()
    keels, torchs = Muon(ours), torch.optim.Muon(theirs, lr=0.02)
    for step in range(3):
        give_gradients(theirs, seed=step)
        torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        a.data.copy_(b)
    keels.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert keels.param_groups[0]["lr"] == 0.02
    give_gradients(ours, theirs, seed=9)
    keels.step()
    torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-6


NAMED = [("layer.weight", (6, 4)), ("layer.bias", (6,))]


def named(*names: str):
    shapes = dict(NAMED)
    return [(name, torch.nn.Parameter(torch.zeros(shapes[name]))) for name in names]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": torch.ones(2)}, "lr must hold one number"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"momentum": 1.1}, "momentum must be at most 1"),
        ({"weight_decay": -1}, "weight_decay must be at least 0"),
        ({"adjust_lr_fn": "spectral"}, "adjust_lr_fn must be .* got 'spectral'"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"num_heads": 4}, r"'layer.weight' of shape \(6, 4\) has 6 rows, which 4 heads"),
        ({"split_sizes": (4, 4)}, r"'layer.weight' .* 6 rows, but .* are \(4, 4\), together 8"),
        ({"split_sizes": (3, 3), "num_heads": 2}, "'layer.weight': split_sizes and num_heads"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(named("layer.weight"), **options)


def test_bad_parameters():
    with pytest.raises(ValueError, match=r"'layer.bias' of shape \(6,\) is no matrix.*use_muon"):
        Muon(named("layer.weight", "layer.bias"))
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 of shape \(3,\) is no matrix"):
        Muon([torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(3))])
    whole = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 has dtype torch.complex64"):
        Muon([whole])
    (param,) = parameters(shapes=[(4, 4)])
    with pytest.raises(ValueError, match="no option 'maximize'"):
        Muon([{"params": [param], "maximize": True}])
    with pytest.raises(TypeError, match="foreach"):
        Muon([param], foreach=True)
    with pytest.raises(ValueError, match="num_heads has no meaning"):
        Muon([{"params": [param], "use_muon": False, "num_heads": 2}])
    with pytest.raises(ValueError, match="betas"):
        Muon([{"params": [param], "use_muon": False, "betas": (0.9, 1.0)}])
    optimizer = Muon([param])
    with pytest.raises(ValueError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1  # as it was
    param.grad = torch.eye(4).to_sparse()
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 has a sparse gradient"):
        optimizer.step()
