"""MuonClip: Muon and an attached QKClip in one object, with parameters sorted by what they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from keel import masks
from keel.nn import GPT, GPTConfig
from keel.optim import Muon, MuonClip, QKClip
from keel.optim.muon_clip import sort_parameters

MASK = masks.documents([0, 9, 24], causal=True)
FP32 = torch.float32
"""Of Newton-Schulz: bf16 is slow on most CPUs."""
TAU = 0.3
"""Low enough that steps clip."""


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 4}
    return GPT(GPTConfig(**(sizes | {"qkv_bias": True} | changes)))


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """Weights after these steps."""
    for step in steps:
        tokens = torch.randint(64, (24,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(tokens, MASK).logsumexp(-1).square().mean().backward()
        optimizer.step()
    return [x.detach().clone() for x in model.parameters()]


def names_by_group(model: nn.Module, **options: Any) -> list[list[str]]:
    groups = sort_parameters(model, aux_lr=1e-3, aux_weight_decay=0.0, **options)
    return [[name for name, _ in group["params"]] for group in groups]


def test_equals_muon_with_an_attached_clip() -> None:
    one, two = gpt(), gpt()
    is_hidden = {n: n.startswith("layers") and x.ndim == 2 for n, x in two.named_parameters()}
    named = dict(two.named_parameters())
    aux = {"use_muon": False, "lr": 3e-3}
    parts = Muon(
        [
            {"params": [x for n, x in named.items() if is_hidden[n]]},
            {
                "params": [x for n, x in named.items() if x.ndim == 2 and not is_hidden[n]],
                **aux,
                "weight_decay": 0.05,
            },
            {"params": [x for x in named.values() if x.ndim == 1], **aux, "weight_decay": 0.0},
        ],
        lr=0.02,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=FP32,
    )
    clip = QKClip.from_model(two, tau=TAU, alpha=0.25)
    clip.attach(parts)
    whole = MuonClip(
        *(one, 0.02),
        tau=TAU,
        alpha=0.25,
        aux_lr=3e-3,
        aux_weight_decay=0.05,
        momentum=0.9,
        ns_dtype=FP32,
    )
    assert isinstance(whole, Muon)
    for x, y in zip(train(one, whole, range(5)), train(two, parts, range(5)), strict=True):
        assert torch.equal(x, y)
    assert whole.metrics is not None and clip.metrics is not None
    assert torch.equal(whole.metrics.gamma, clip.metrics.gamma)
    assert int(whole.metrics.clipped) > 0


def test_the_clip_acts() -> None:
    """Without it the same steps give other weights: the equality above is not of two nothings."""
    one, two = gpt(), gpt()
    never = train(one, MuonClip(one, 0.02, tau=1e9, ns_dtype=FP32), range(3))
    clipped = train(two, MuonClip(two, 0.02, tau=TAU, ns_dtype=FP32), range(3))
    assert not all(torch.equal(x, y) for x, y in zip(never, clipped, strict=True))


def test_state_round_trip() -> None:
    model = gpt()
    optimizer = MuonClip(model, 0.02, tau=TAU, every=2, ns_dtype=FP32)
    train(model, optimizer, range(3))  # the next step clips: its number is part of the state
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, range(3, 7))

    resumed = gpt()
    resumed.load_state_dict(weights)
    again = MuonClip(resumed, 0.02, tau=TAU, every=2, ns_dtype=FP32)
    again.load_state_dict(state)
    for x, y in zip(train(resumed, again, range(3, 7)), expected, strict=True):
        assert torch.equal(x, y)
    ours, theirs = again.clip.state_dict(), optimizer.clip.state_dict()
    assert ours["steps"] == theirs["steps"] == 7
    for name, entry in theirs["layers"].items():
        assert int(entry["clips"].sum()) > 0
        assert all(torch.equal(entry[key], ours["layers"][name][key]) for key in entry)


def test_a_state_of_muon_loads() -> None:
    model, other = gpt(), gpt()
    muon = Muon(sort_parameters(other, aux_lr=0.02, aux_weight_decay=0.1), lr=0.02, ns_dtype=FP32)
    train(other, muon, range(2))
    optimizer = MuonClip(model, 0.02, tau=TAU, ns_dtype=FP32)
    train(model, optimizer, range(1))
    optimizer.load_state_dict(muon.state_dict())
    buffer = optimizer.state[model.layers[0].mlp.up_proj.weight]["momentum_buffer"]
    assert torch.equal(buffer, muon.state[other.layers[0].mlp.up_proj.weight]["momentum_buffer"])
    assert optimizer.clip.state_dict()["steps"] == 1


class Tied(nn.Module):
    """With all that is not hidden, and things that only look like it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)
        self.tokens = nn.Embedding(16, 8)
        self.tied = nn.Linear(8, 16, bias=False)
        self.tied.weight = self.tokens.weight
        self.pos_embedding = nn.Parameter(torch.zeros(4, 8))
        self.conv = nn.Conv1d(8, 8, 3)
        self.layers = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(8, 8)})])
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


class WithOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(8, 8), nn.Linear(8, 16)

    def get_output_embeddings(self) -> nn.Module:
        return self.last


def test_sorting() -> None:
    assert names_by_group(Tied()) == [
        ["experts", "layers.0.output.weight"],
        ["pos_embedding", "head.weight", "tokens.weight", "conv.weight"],
        ["head.bias", "conv.bias", "layers.0.output.bias"],
    ]
    assert names_by_group(WithOutputs()) == [
        ["up.weight"],
        ["last.weight"],
        ["up.bias", "last.bias"],
    ]
    chosen = names_by_group(WithOutputs(), use_muon=lambda name, x: name == "last.weight")
    assert chosen == [["last.weight"], ["up.weight"], ["up.bias", "last.bias"]]
    optimizer = MuonClip(gpt(), 0.02, aux_lr=1e-4)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    rates = [group["lr"] for group in optimizer.param_groups]
    assert (decays, rates) == ([0.1, 0.1, 0.0], [0.02, 1e-4, 1e-4])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda m: MuonClip(m.parameters(), 0.1), TypeError, "takes a model, got generator"),
        (lambda m: MuonClip(m, 0.1, tau=0.0), ValueError, "tau must be a positive"),
        (lambda m: MuonClip(m, -1.0), ValueError, "lr must be at least 0, got -1.0"),
        (lambda m: MuonClip(m, 0.1, aux_lr=-1.0), ValueError, "lr must be at least 0, got -1.0"),
        (lambda m: MuonClip(m.layers[0].mlp), ValueError, "no attention that learns"),
        (lambda m: MuonClip(m, beta=3), TypeError, "beta"),
        (lambda m: MuonClip(m, use_muon=lambda n, x: 1), TypeError, "got 1 for 'embedding.weight'"),
        (
            lambda m: MuonClip(m, use_muon=lambda n, x: True),
            ValueError,
            r"attention_norm.weight' of shape \(32,\) to Muon, which trains matrices",
        ),
        (
            lambda m: MuonClip(m, use_muon=lambda n, x: False),
            ValueError,
            "GPT has no matrix for Muon to train",
        ),
    ],
)
def test_bad_input(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(gpt())


def test_a_state_of_another_model_is_refused() -> None:
    state = MuonClip(gpt(num_layers=1), 0.1).state_dict()
    with pytest.raises(ValueError):
        MuonClip(gpt(), 0.1).load_state_dict(state)
