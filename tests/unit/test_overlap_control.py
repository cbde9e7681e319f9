"""Levers of overlap: where margins come from, and what is said about settings."""

from __future__ import annotations

import logging

import pytest
import torch

from keel import masks
from keel.distributed import attention, calc_attn, flex_key
from keel.overlap import KernelBarrier, OverlapConfig, advise, levers
from keel.overlap.control import (
    BACKWARD_MARGIN,
    CONNECTIONS,
    FORWARD_MARGIN,
    NCCL_CLUSTERS,
    NCCL_PRIORITY,
    warn_once,
)
from keel.testing import run_ranks


@pytest.mark.parametrize(
    ("config", "environment", "want"),
    [
        ({}, {}, (0, 0)),
        ({}, {FORWARD_MARGIN: "4", BACKWARD_MARGIN: " 12 "}, (4, 12)),
        ({"forward_sm_margin": 2}, {FORWARD_MARGIN: "4", BACKWARD_MARGIN: "12"}, (2, 12)),
        ({"forward_sm_margin": 0, "backward_sm_margin": 0}, {FORWARD_MARGIN: "x"}, (0, 0)),
    ],
)
def test_arguments_go_before_variables(config, environment, want):
    assert OverlapConfig(**config).margins(environment) == want


@pytest.mark.parametrize("text", ["", "-1", "4.0", "four", "0x4", "٤"])
def test_nonsense_in_variables_is_named(text, monkeypatch):
    monkeypatch.setenv(BACKWARD_MARGIN, text)
    with pytest.raises(ValueError, match=f"{BACKWARD_MARGIN} must be a number of SMs.*unset"):
        OverlapConfig().margins()
    found = {x.name: x for x in levers()}[BACKWARD_MARGIN]
    assert found.harmful and "must be a number of SMs" in found.meaning


def test_bad_arguments():
    with pytest.raises(ValueError, match="forward_sm_margin must be at least 0, got -3"):
        OverlapConfig(forward_sm_margin=-3)
    with pytest.raises(TypeError, match=r"backward_sm_margin must be a number of SMs.*got 2\.0"):
        OverlapConfig(backward_sm_margin=2.0)
    with pytest.raises(TypeError, match="got True"):
        OverlapConfig(forward_sm_margin=True)
    with pytest.raises(TypeError, match="barrier must be True or False, got 8"):
        OverlapConfig(barrier=8)


def test_a_barrier_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr("keel.overlap.barrier._interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"a stream of a CUDA device, got cpu.*use target=0"):
        KernelBarrier(1, device="cpu")
    assert KernelBarrier(0, device="cpu").flag is None


def margins_seen(rank: int, how: str) -> list[tuple[str, int]]:
    """What the kernels of one rank are told, in both directions."""
    seen = []

    def spy(name, function):
        def call(*args, **kwargs):
            seen.append((name, kwargs["sm_margin"]))
            return function(*args, **kwargs)

        return call

    attention.accumulate_ = spy("forward", attention.accumulate_)
    attention.partial_gradients = spy("backward", attention.partial_gradients)
    key = flex_key(masks.causal(32), group=torch.distributed.group.WORLD)
    q, k, v = (torch.randn(key.num_local, 2, 8, requires_grad=True) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORWARD_MARGIN, "3")
        patch.setenv(BACKWARD_MARGIN, "5")
        options = {
            "environment": {},
            "config": {"overlap": OverlapConfig(backward_sm_margin=7)},
            "argument": {"sm_margin": 9},
        }[how]
        out, _ = calc_attn(q, k, v, key, **options)
        with pytest.raises(ValueError, match="sm_margin or overlap, not both"):
            calc_attn(q, k, v, key, sm_margin=1, overlap=OverlapConfig())
        patch.setenv(FORWARD_MARGIN, "many")
        with pytest.raises(ValueError, match=FORWARD_MARGIN):
            calc_attn(q, k, v, key)
    out.sum().backward()
    return seen


@pytest.mark.parametrize(
    ("how", "forward", "backward"), [("environment", 3, 5), ("config", 3, 7), ("argument", 9, 9)]
)
def test_calc_attn_tells_the_kernels(how, forward, backward):
    (seen,) = run_ranks(margins_seen, 1, how)
    assert set(seen) == {("forward", forward), ("backward", backward)}


def test_each_lever_says_what_it_found(capsys):
    bad = {CONNECTIONS: "1", NCCL_CLUSTERS: "4", NCCL_PRIORITY: "0", FORWARD_MARGIN: "8"}
    text = advise(bad)
    assert capsys.readouterr().out == text + "\n"
    assert f"! {CONNECTIONS} = 1" in text and "share one hardware queue" in text
    assert "leaves 8 SMs free" in text and "The backward may fill every SM" in text
    assert "set this to 1 before init_process_group" in text and "Clusters of blocks" in text
    good = {CONNECTIONS: "8", NCCL_CLUSTERS: "1", NCCL_PRIORITY: "1", FORWARD_MARGIN: "8"}
    text = advise(good)
    assert "!" not in text and "NCCL's kernels go before" in text and "Single blocks" in text
    assert "not set" in advise({})


def test_the_command_prints_it():
    from typer.testing import CliRunner

    from keel.cli import build_app

    result = CliRunner().invoke(build_app(), ["overlap", "advise"], env={CONNECTIONS: "1"})
    assert result.exit_code == 0 and f"! {CONNECTIONS} = 1" in result.output


def test_what_stands_in_the_way_is_logged_once(monkeypatch, caplog):
    monkeypatch.setenv(CONNECTIONS, "1")
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "keel"):
        warn_once()
        warn_once()
    warn_once.cache_clear()
    assert len(caplog.records) == 1 and CONNECTIONS in caplog.text
