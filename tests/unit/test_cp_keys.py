"""Keys and the cost model: values, errors, choices."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from keel import flex_flash_attn_func, masks
from keel._versions import backend_of
from keel.distributed import (
    CostModel,
    Layout,
    MaxLogitsTracker,
    agreement,
    calc_attn,
    dispatch,
    flex_key,
    get_position_ids,
    group_cast,
    group_reduce,
    make_plan,
    undispatch,
    varlen_key,
)
from keel.distributed.comm import queues
from keel.distributed.cost import best_degree, estimate, other_schemes, scheme_of
from keel.distributed.layout import contiguous, zigzag

PLANNING = {"num_ranks": 4, "rank": 1}


def test_keys_are_equal_by_value():
    first, second = (flex_key(masks.causal(100), **PLANNING) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    others = [
        flex_key(masks.causal(100), num_ranks=4, rank=2),
        flex_key(masks.full(100), **PLANNING),
        flex_key(masks.causal(100), **PLANNING, degree=first.degree + 1),
        flex_key(masks.causal(100), **PLANNING, balance="zigzag"),
        flex_key(masks.causal(100), **PLANNING, keep_remote_keys=True),
    ]
    assert all(other != first for other in others) and len({first, second, *others}) == 6


def test_ranges_and_documents_make_the_same_key():
    ranges = [[0, 40], [40, 100]]
    by_ranges = flex_key(ranges, ranges, ["causal", "causal"], 100, **PLANNING)
    assert by_ranges == varlen_key([0, 40, 100], causal=True, **PLANNING)


def test_ranks_share_all_tokens():
    keys = [flex_key(masks.causal(101), num_ranks=3, rank=r) for r in range(3)]
    tokens = torch.cat([key.position_ids() for key in keys])
    assert sorted(tokens.tolist()) == list(range(101))
    for key in keys:
        x = torch.randn(101, 2)
        assert torch.equal(dispatch(x, key), x[key.position_ids()])
        assert key.num_local == len(key.position_ids()) == key.num_local_keys


def test_another_mask_on_the_same_tokens():
    key = flex_key(masks.causal(100), **PLANNING)
    other = key.with_mask(masks.sliding_window(100, left=5))
    assert other.q_layout is key.q_layout and other.mask != key.mask
    assert other.forward_plan.rows_received.sum() < key.forward_plan.rows_received.sum()
    with pytest.raises(ValueError, match=r"\(100, 100\)"):
        key.with_mask(masks.causal(99))


def test_fingerprints_are_the_same_in_every_process():
    program = (
        "from keel import masks; from keel.distributed import flex_key;"
        "print(flex_key(masks.causal(100), num_ranks=4, rank=3).fingerprint)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(flex_key(masks.causal(100), **PLANNING).fingerprint)


def test_a_picture_of_a_key(tmp_path):
    key = flex_key(masks.causal(256), **PLANNING, balance="zigzag")
    key.draw(str(tmp_path / "key.png"), title="four ranks")
    picture = (tmp_path / "key.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    assert torch.equal(get_position_ids(key), key.position_ids())


def test_describe_names_every_rank():
    lines = flex_key(masks.causal(256), **PLANNING, balance="zigzag").describe().splitlines()
    assert len(lines) == 5
    for rank, line in enumerate(lines[1:]):
        number, tokens, pieces, _area, balance, rows = line.split()
        assert (int(number), int(tokens)) == (rank, 64)
        assert int(pieces) == (2 if rank < 3 else 1) and float(balance) == pytest.approx(
            1, abs=0.01
        )
        assert int(rows) == (rank > 0) * 0 + [256 - 64, 224 - 64, 192 - 64, 160 - 64][rank]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"rank": 1}, "rank goes with num_ranks"),
        ({"num_ranks": 4, "rank": 4}, r"rank must be in 0\.\.3, got 4"),
        (
            {**PLANNING, "balance": "fair"},
            "must be 'contiguous', 'zigzag', 'solver', 'traffic' or a Layout",
        ),
        ({**PLANNING, "balance": contiguous(99, 4)}, "99 tokens over 4 ranks, expected 100 over 4"),
        ({**PLANNING, "degree": -1}, r"degree must be 'auto' or an int in 0\.\.64, got -1"),
        ({**PLANNING, "degree": True}, "got True"),
        ({**PLANNING, "backward_degree": 2.0}, "backward_degree must be"),
        (
            {**PLANNING, "degree": 1, "backward_degree": 2, "keep_remote_keys": True},
            "same stages both ways",
        ),
        ({**PLANNING, "total_seqlen_q": 99}, r"the mask is for \(100, 100\) tokens"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        flex_key(masks.causal(100), **arguments)


def test_refused_without_what_is_needed():
    with pytest.raises(RuntimeError, match="not initialised"):
        flex_key(masks.causal(100))
    with pytest.raises(ValueError, match="k_balance"):
        flex_key(masks.causal(50, 100), **PLANNING)
    with pytest.raises(ValueError, match="total_seqlen_q"):
        flex_key([[0, 4]], [[0, 4]], **PLANNING)
    key = flex_key(masks.causal(100), **PLANNING)
    x = torch.zeros(key.num_local, 1, 8)
    with pytest.raises(ValueError, match="only plans"):
        calc_attn(x, x, x, key)
    for call in (dispatch, undispatch):
        with pytest.raises(TypeError, match="x must be a tensor, got list"):
            call([1, 2], key)
    with pytest.raises(ValueError, match="99 tokens in dim 0"):
        dispatch(torch.zeros(99), key)


def test_a_tracker_without_ranks_keeps_its_maxima():
    tracker = MaxLogitsTracker()
    assert tracker.reduce() == []
    tracker.add(torch.ones(2))
    with pytest.raises(RuntimeError, match="no ranks to reduce over"):
        tracker.reduce()
    assert torch.equal(tracker.local()[0], torch.ones(2))


class TwoRanks:
    """Stands for a process group."""

    def size(self) -> int:
        return 2


def test_when_ranks_compare(monkeypatch):
    """Once for each combination; all is forgotten at once, so that ranks forget alike."""
    asked = []
    monkeypatch.setattr(agreement, "_compare", lambda *args: asked.append(args[2]))
    monkeypatch.setattr(agreement, "MOST_REMEMBERED", 3)
    group, other = TwoRanks(), TwoRanks()

    def ask(number, group=group):
        before = len(asked)
        agreement.agree(group, {"mask": 1}, {"softcap": number}, None)
        return len(asked) > before

    assert [ask(n) for n in (0, 1, 0, 1, 2, 2)] == [True, True, False, False, True, False]
    assert ask(0, other)  # another group
    assert ask(3) and ask(0) and not ask(3)
    monkeypatch.setenv("KEEL_CHECK_AGREEMENT", "always")
    assert ask(3) and ask(3)
    monkeypatch.setenv("KEEL_CHECK_AGREEMENT", "never")
    assert not ask(77)
    monkeypatch.setenv("KEEL_CHECK_AGREEMENT", "sometimes")
    with pytest.raises(ValueError, match="must be 'first', 'always' or 'never', got 'sometimes'"):
        ask(0)


def test_layouts_survive_pickling():
    layout = zigzag(100, 4)
    assert pickle.loads(pickle.dumps(layout)) == layout != contiguous(100, 4)


def model(**changes: float) -> CostModel:
    return CostModel(num_heads=1, num_kv_heads=1, head_dim=1, itemsize=1, **changes)


def test_estimate_of_a_timeline_by_hand():
    """Two ranks, full mask: 100 rows each way, 4 * 100 * 100 FLOPs of own and of remote keys."""
    layout = contiguous(200, 2)
    rates = model(tflops=1e-5, gb_per_s=1e-5, latency_us=0.0)  # 4 ms per stage, 20 ms per fetch
    plan = make_plan(masks.full(200), layout, layout, 1)
    found = estimate(plan, rates)
    assert found.compute == pytest.approx([8.0, 8.0])
    assert found.exposed == pytest.approx([16.0, 16.0])
    assert found.total == pytest.approx([24.0, 24.0]) and found.slowest == pytest.approx(24.0)
    blocking = estimate(make_plan(masks.full(200), layout, layout, 0), rates)
    assert blocking.exposed == pytest.approx([20.0, 20.0])
    assert blocking.total == pytest.approx([28.0, 28.0])
    backward = estimate(plan, rates, backward=True)  # gradients travel in four bytes
    assert backward.exposed[0] == pytest.approx(5 * 20.0, rel=1e-6)
    assert backward.compute[0] == pytest.approx(2.5 * 8.0 * 1e-5 / 400)


def test_stages_pay_when_a_fetch_is_as_long_as_the_work():
    layout = zigzag(4096, 8)
    mask = masks.causal(4096)
    even = CostModel(gb_per_s=200.0, latency_us=0.0)
    assert best_degree(mask, layout, layout, even) > 1
    endless_latency = CostModel(latency_us=1e6)
    assert best_degree(mask, layout, layout, endless_latency) == 1


def test_the_solver_balances_where_that_pays():
    """Few tokens on slow links stay in order; many, or on links that cost nothing, do not."""
    free = CostModel(gb_per_s=1e9, latency_us=0.0)
    documents = masks.documents([0, 350, 500, 1000], causal=True)
    assert flex_key(documents, **PLANNING).q_layout == contiguous(1000, 4)
    assert flex_key(documents, **PLANNING, cost=free).q_layout != contiguous(1000, 4)
    for mask, cost in ((masks.causal(1000), free), (masks.causal(1 << 20), None)):
        plan = flex_key(mask, **PLANNING, cost=cost).forward_plan
        area = plan.areas.sum(1)
        assert area.max() / area.mean() < 1.05


def test_schemes_on_documents():
    """Documents need a part of what schemes move that do not look at the mask."""
    rates = CostModel()
    mask = masks.documents(np.arange(0, 65_537, 4096), causal=True)
    layout = contiguous(65_536, 8)
    ours = scheme_of("contiguous", make_plan(mask, layout, layout, 1), rates)
    assert ours.total_bytes == 0 and ours.balance == pytest.approx(1.0)
    ring, gather, ulysses = other_schemes(mask, 8, rates)
    assert ring.max_bytes == gather.max_bytes == (65_536 - 8192) * 8 * 256 * 2
    moved = 8192 * 7 // 8 * (64 * 256 + 8 * 256) * 2  # q and out, k and v
    assert ulysses.max_bytes == moved


@pytest.mark.parametrize("num_ranks", [8, 32, 64])
def test_documents_move_less_than_in_schemes_that_ignore_the_mask(num_ranks):
    """Also the rank that receives the most; lengths lognormal, up to a quarter of all tokens."""
    tokens = 16_384 * num_ranks
    lengths = np.random.default_rng(0).lognormal(np.log(tokens / 24), 1.2, 100)
    bounds = np.minimum(np.cumsum(np.append(0, np.clip(lengths, 16, tokens / 4))), tokens)
    mask = masks.documents(np.unique(bounds.astype(np.int64)), causal=True)
    key = flex_key(mask, num_ranks=num_ranks, rank=0)
    ours = scheme_of("solver", key.forward_plan, CostModel())
    assert ours.balance < 1.03
    for other in other_schemes(mask, num_ranks, CostModel()):
        assert ours.max_bytes <= other.max_bytes, other


def test_layout_objects_balance_as_told():
    layout = Layout([0, 10], [10, 100], [3, 0], 4)
    key = flex_key(masks.causal(100), **PLANNING, balance=layout)
    assert key.num_local == 0 and key.q_layout.rows.tolist() == [90, 0, 0, 10]


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_calls_that_cannot_work(alone, monkeypatch):
    key = flex_key(masks.causal(20))
    x = torch.zeros(20, 1, 8)
    with pytest.raises(ValueError, match="q has 19 tokens, but the key gives rank 0 20"):
        calc_attn(x[:19], x, x, key)
    with pytest.raises(ValueError, match="k has 21 tokens"):
        calc_attn(x, torch.zeros(21, 1, 8), x, key)
    with pytest.raises(ValueError, match="sink must have shape"):
        calc_attn(x, x, x, key, sink=torch.zeros(2))
    with pytest.raises(ValueError, match="'reference' has no stages"):
        calc_attn(x, x, x, key, backend="reference")
    with pytest.raises(ValueError, match="mesh must have one dim, or two"):
        flex_key(masks.causal(20), group=init_device_mesh("cpu", (1, 1, 1)))
    with pytest.raises(ValueError, match="needs names"):
        flex_key(masks.causal(20), group=init_device_mesh("cpu", (1, 1)))
    with pytest.raises(ValueError, match="x has 3 tokens in dim 1, but rank 0 holds 20"):
        undispatch(torch.zeros(20, 3), key, dim=1)
    monkeypatch.setattr("keel.distributed.attention.backend_of", lambda group, device: None)
    with pytest.raises(ValueError, match="no backend for tensors on cpu, where q is"):
        calc_attn(x, x, x, key)


def test_groups_whose_backend_has_no_name():
    """As torchrun's users make them; torch then calls the backend "undefined"."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        cpu = torch.device("cpu")
        assert backend_of(dist.group.WORLD, cpu) == "gloo"
        assert not queues(dist.group.WORLD, cpu)
        if not torch.cuda.is_available():
            assert backend_of(dist.group.WORLD, torch.device("cuda")) is None
        x = torch.randn(20, 1, 8, dtype=torch.bfloat16)
        out, _ = calc_attn(x, x, x, flex_key(masks.causal(20)))
        want, _ = flex_flash_attn_func(x, x, x, masks.causal(20), backend="blocked")
        assert torch.equal(out, want)
    finally:
        dist.destroy_process_group()


def test_group_operations_that_cannot_work(alone):
    exchange = flex_key(masks.full(4), degree=0).forward_plan.stages_of(0)[0].exchange
    world, x = dist.group.WORLD, torch.zeros(4, 2, 8)
    for tensors, message in (
        ([], "no tensors"),
        ([x, x.double()], "one dtype"),
        ([x, x[:3]], "4 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            group_cast(tensors, exchange, world)
    with pytest.raises(ValueError, match="and 4 rows, got"):
        group_reduce([x[:3]], exchange, world)
    with pytest.raises(ValueError, match="must be 'sum' or 'softmax', got 'mean'"):
        group_reduce([x], exchange, world, op="mean")
    with pytest.raises(ValueError, match=r"takes out \(rows, h, dv\) and lse \(rows, h\)"):
        group_reduce([x, x], exchange, world, op="softmax")
    reduce = group_reduce([x], exchange, world)
    with pytest.raises(RuntimeError, match="view"):
        reduce.add_to([torch.zeros(4, 8, 2).transpose(1, 2)])  # a copy would lose the sum


def test_one_rank_alone_is_plain_attention(alone):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 30, 2, 8, dtype=torch.float64).unbind()
    mask = masks.documents([0, 11, 30], causal=True)
    want, meta = flex_flash_attn_func(q, k, v, mask, return_max_logits=True)
    for degree in (0, 2):
        out, found = calc_attn(q, k, v, flex_key(mask, degree=degree), return_max_logits=True)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(found.lse, meta.lse)
        assert torch.equal(found.max_logits, meta.max_logits)
