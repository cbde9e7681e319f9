"""What the Hopper backward chooses: splits, heads at once, ways to dq, what it is compiled for."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from keel import masks
from keel.kernels import hopper_bwd_launch, hopper_dq_launch, hopper_launch
from keel.key_records import key_records
from keel.masks import AttnMask
from keel.meta import Scoring
from keel.tile_parts import end_of_last


def test_splits_when_they_end_earlier():
    def chosen(mask: AttnMask, group: int) -> int:
        tile_work = key_records(mask, 64).tile_work
        return hopper_bwd_launch.choose_splits(tile_work, hk=8, group=group, sms=132)

    assert chosen(masks.full(2048), 8) == 1  # 128 blocks of threads, all alike
    assert chosen(masks.causal(2048), 8) in (2, 4)  # the longest would be alone at the end
    assert chosen(masks.causal(2048), 1) == 1
    assert chosen(masks.causal(65536), 8) == 1
    assert chosen(masks.full(256), 8) == 8  # 16 blocks of threads for 132 SMs
    assert chosen(masks.full(32768), 8) == 1  # 8 end 1 % earlier, if they take no longer


LONG_AND_SHORT = masks.documents(
    [0, 2048, 2500, 3100, 4000, 4300, 5900, 6100, 7000, 7400, 8192], causal=True
)


@pytest.mark.parametrize(
    ("mask", "block_m", "section"),
    [  # of causal ones the fastest of 1, 2, 4 .. 32 on an H200
        (masks.causal(2048), 64, 8),
        (masks.causal(4096), 64, 4),
        (masks.causal(4096), 128, 4),
        (masks.causal(8192), 64, 2),  # 4 to 32 are as fast; 1 leaves the longest tiles to the end
        (masks.causal(8192), 128, 2),
        (LONG_AND_SHORT, 64, 4),  # 2 fill the SMs
        (masks.causal(131072), 64, 32),  # so many tiles that nobody looks for the best
    ],
)
def test_heads_at_once_that_the_l2_holds(mask, block_m, section):
    tile_work = key_records(mask, block_m).tile_work
    assert hopper_bwd_launch.choose_section(tile_work, 32, 132) == section


SHORT_DOCUMENTS = masks.documents([*range(0, 2000, 200), *range(2000, 4097, 600)], causal=True)


@pytest.mark.parametrize(
    ("mask", "way", "without_order"),
    [
        (masks.full(8192), "plain", "plain"),
        (masks.causal(1024), "plain", "plain"),  # all of it nearly fits into the L2
        (masks.causal(2048), "apart", "apart"),  # heads are split
        (masks.causal(4096), "together", "apart"),  # those that run at once have 65 to 33 blocks
        (masks.causal(16384), "together", "plain"),  # 257 to 225
        (masks.sliding_window(8192, left=1024), "plain", "plain"),
        (masks.documents([0, 3000, 5000, 8192], causal=True), "together", "apart"),
        (masks.documents([0, 3000, 5000, 8192]), "plain", "plain"),  # tiles of a document are alike
        (SHORT_DOCUMENTS, "apart", "apart"),  # few tiles for each row
    ],
)
def test_the_way_of_dq(mask, way, without_order):
    def fastest(hq: int, d: int, in_order: bool) -> str:
        return hopper_bwd_launch.fastest_way(mask, hq, d, d, 8, 132, 50 << 20, in_order=in_order)

    assert fastest(64, 128, True) == way
    assert fastest(64, 128, False) == without_order
    assert fastest(8, 128, True) == "plain"
    assert fastest(64, 64, False) == "plain"
    assert fastest(32, 128, True) == (way if fastest(32, 128, False) == "apart" else "plain")


@pytest.mark.parametrize("margin", [0, 8])
@pytest.mark.parametrize("outs_match", [True, False])
def test_the_way_of_dq_with_a_margin(margin, outs_match, monkeypatch):
    monkeypatch.setattr(hopper_bwd_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_bwd_launch, "l2_bytes", lambda device: 50 << 20)
    q, v = (torch.empty(4096, heads, 128, device="meta") for heads in (64, 8))
    found = hopper_bwd_launch.dq_apart(
        *(masks.causal(4096), q, v, 8, Scoring(scale=1.0)),
        **{"deterministic": False, "sm_margin": margin, "outs_match": outs_match},
    )
    assert found is not outs_match  # heads take turns where dk and dv can leave by TMA


@pytest.mark.parametrize(("hq", "hk"), [(64, 8), (32, 4), (128, 8), (48, 8), (40, 8)])
@pytest.mark.parametrize("d", [64, 128])
def test_a_mask_that_warms_up_turns(hq, hk, d, monkeypatch):
    monkeypatch.setattr(hopper_bwd_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_bwd_launch, "l2_bytes", lambda device: 50 << 20)
    given = hopper_bwd_launch.mask_of_turns(hq, hk, d, d, torch.device("meta"))
    assert given is not None
    way = hopper_bwd_launch.fastest_way(given, hq, d, d, hk, 132, 50 << 20, in_order=True)
    assert way == "together"
    assert hopper_bwd_launch.mask_of_turns(hq, hq, d, d, torch.device("meta")) is None
    assert hopper_bwd_launch.mask_of_turns(hq, hk, d, 256, torch.device("meta")) is None


@pytest.mark.parametrize(
    ("d", "score", "apart"),
    [
        (128, {}, False),
        (128, {"softcap": 5.0}, False),
        (64, {}, False),
        (64, {"softcap": 5.0}, True),
        (256, {}, True),
        (128, {"bias": torch.zeros(8, 64, 64)}, True),
        (64, {"alibi_slopes": torch.zeros(8)}, True),
    ],
)
def test_dq_apart_where_there_is_no_other_way(d, score, apart, monkeypatch):
    monkeypatch.setattr(hopper_bwd_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_bwd_launch, "l2_bytes", lambda device: 50 << 20)
    q = torch.empty(64, 8, d, device="meta")
    scoring = Scoring(scale=1.0, **score)
    found = hopper_bwd_launch.dq_apart(
        masks.full(64), q, q, 8, scoring, deterministic=False, sm_margin=0
    )
    assert found is apart


@pytest.mark.parametrize(
    ("d", "dv", "softcap", "tokens", "problem"),
    [
        (64, 64, 0.0, 100, None),
        (128, 128, 5.0, 100, None),
        (256, 256, 0.0, 100, None),
        (192, 128, 5.0, 100, None),
        (264, 64, 0.0, 100, "at most 256"),
        (128, 128, 0.0, 65_535 * 64, None),
        (128, 128, 0.0, 65_535 * 64 + 1, "more than 4194240"),
        (256, 256, 0.0, 65_535 * 32, None),
        (256, 256, 0.0, 65_535 * 32 + 1, "more than 2097120"),  # tiles of 64 keys
    ],
)
def test_what_is_let_through(d, dv, softcap, tokens, problem, monkeypatch):
    monkeypatch.setattr(hopper_launch, "machine_problem", lambda device: None)
    q, k, v, dout = (
        torch.empty(tokens, 1, dim, dtype=torch.bfloat16, device="meta") for dim in (d, d, dv, dv)
    )
    found = hopper_bwd_launch.backward_problem(dout, q, k, v, Scoring(softcap=softcap, scale=1.0))
    assert (found is None) if problem is None else (problem in found)


FULL, OFFSET = torch.zeros(4, 7, 9), torch.zeros(7, dtype=torch.int32)
SLOPES = torch.zeros(4)
FP32_AND_LARGE = "a bias in fp32 is not supported above head dim 192"


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        ({"bias": FULL.half()}, None),
        ({"bias": FULL.bfloat16(), "softcap": 2.0}, None),
        ({"bias": FULL[:1, :1].half(), "softcap": 2.0}, None),
        ({"bias": FULL[:1].half().expand(4, -1, -1)}, None),
        ({"bias": FULL[:, :, :1]}, "there must be 9 keys"),
        ({"bias": torch.zeros(4, 9, 7).transpose(1, 2)}, "the last stride must be 1"),
        ({"bias": FULL.double()}, "a bias of torch.float64"),
        ({"bias": FULL, "alibi_slopes": SLOPES}, "bias and ALiBi together"),
        ({"alibi_slopes": SLOPES, "softcap": 2.0}, None),
        ({"alibi_slopes": SLOPES, "alibi_offset": OFFSET}, None),
        ({"alibi_slopes": SLOPES, "alibi_offset": OFFSET.long()}, "must be int32"),
        (
            {"alibi_slopes": SLOPES, "alibi_offset": OFFSET, "softcap": 2.0},
            "a softcap is not supported with an alibi_offset",
        ),
    ],
)
@pytest.mark.parametrize("d", [64, 192, 256])
def test_which_bias_is_let_through(d, score, problem, monkeypatch):
    monkeypatch.setattr(hopper_launch, "machine_problem", lambda device: None)
    q, k = (torch.empty(n, 4, d, dtype=torch.bfloat16, device="meta") for n in (7, 9))
    scoring = Scoring(scale=1.0, **score)
    found = hopper_bwd_launch.backward_problem(q, q, k, k, scoring)
    assert (found is None) if problem is None else (problem in found)
    if problem is None and "bias" in score:
        wider = replace(scoring, bias=scoring.bias.float())
        found = hopper_bwd_launch.backward_problem(q, q, k, k, wider)
        assert found == (FP32_AND_LARGE if d > 192 else None)
    # the forward has none of it, whatever the backward can do
    assert hopper_launch.hopper_problem(q, k, k, scoring) == "bias and ALiBi are not supported"


@pytest.mark.parametrize(
    ("d", "dv", "name", "blocks", "tile"),
    [  # columns of keys and of values; keys of a tile, rows of a block
        (64, 64, "BackwardForm", (64, 64), (128, 128)),
        (40, 96, "BackwardForm", (128, 128), (128, 64)),
        (128, 128, "BackwardForm", (128, 128), (128, 64)),
        (192, 128, "WideForm", (256, 128), (64, 64)),
        (64, 136, "WideForm", (64, 256), (64, 64)),
        (256, 256, "WideForm", (256, 256), (64, 64)),
    ],
)
def test_forms(d, dv, name, blocks, tile):
    form = hopper_bwd_launch.choose_backward_form(
        *(d, dv), outs_match=True, persistent=False, with_dq=max(d, dv) <= 128, has_softcap=True
    )
    assert type(form).__name__ == name and form.has_softcap
    assert (form.d, form.dv) == blocks and (form.dk_columns, form.dv_columns) == (d, dv)
    assert (form.parts * 64, form.bm) == hopper_bwd_launch.tile_sizes(d, dv) == tile
    queries = hopper_dq_launch.choose_query_form(
        *(d, dv, 64), out_matches=True, persistent=False, has_softcap=True
    )
    assert (queries.d, queries.dv) == blocks and queries.columns == d and queries.has_softcap
    if name == "WideForm":  # of 256 columns, 192 are multiplied where there are no more
        assert form.short == queries.short == (128 < d <= 192)
    # what the kernels ask for must fit: q, dout, keys, values, and what one consumer hands over
    by_rows = 2 * (128 + 64 * queries.stages) * queries.d + 2 * (128 + 64 * queries.v_stages) * (
        queries.dv
    )
    assert by_rows < 232_448 - 1024
    if name == "WideForm":
        assert 2 * 64 * (1 + form.stages) * (form.d + form.dv) + 32_768 < 232_448 - 1024


def test_forms_that_lack_registers():
    """What would spill is asked for otherwise: results not by TMA, threads that stay, one stage of
    values, barriers by the producer."""
    by_keys = functools.partial(
        hopper_bwd_launch.choose_backward_form, 128, 128, with_dq=False, has_softcap=True
    )
    for persistent in (False, True):
        form = by_keys(outs_match=True, persistent=persistent, has_alibi=True)
        assert (form.staged, form.persistent) == (False, persistent)
    for match in (False, True):
        form = by_keys(outs_match=match, persistent=False, has_bias=True)
        assert (form.staged, form.persistent) == (False, not match)
        for gradient in (False, True):
            by_rows = hopper_dq_launch.choose_query_form(
                *(256, 128, 64),
                **{"out_matches": match, "persistent": False},
                **{"has_bias": True, "want_dbias": gradient},
            )
            assert (by_rows.staged, by_rows.persistent) == (match, not match)
            assert (by_rows.dv, by_rows.v_stages) == (128, 1 if gradient else 2)
    for with_dq, match, persistent in itertools.product((False, True), repeat=3):
        form = hopper_bwd_launch.choose_backward_form(
            128, 128, outs_match=match, persistent=persistent, with_dq=with_dq
        )
        assert form.producer_begins == (with_dq and not match and not persistent)
        assert form.staged == (match and not (with_dq and persistent))
    for d, persistent, with_dq in itertools.product((64, 128), (False, True), (False, True)):
        choose = functools.partial(
            *(hopper_bwd_launch.choose_backward_form, d, d),
            **{"outs_match": True, "persistent": persistent, "with_dq": with_dq},
        )
        assert choose().reads_ahead == (d == 128 and with_dq and not persistent)
        others = [{}, {"has_bias": True}, {"has_alibi": True}, {"together": True}]
        for other in others:
            assert not choose(has_softcap=True, **other).staged
            assert not choose(has_softcap=True, **other).reads_ahead
            assert not (other and choose(**other).reads_ahead)
        form = choose(has_softcap=True, has_alibi=True, has_offset=True)
        assert form.producer_registers == (32 if d == 64 else 24)


def test_end_of_last():
    assert end_of_last([5.0, 4.0, 3.0, 3.0, 3.0], 2) == 10.0
    assert end_of_last([5.0], 3) == 5.0
