"""The Hopper backward's host side: what a launch is given says which gradients come out.

The kernel itself runs on a GPU alone. In its place stands a walk in fp64 over the same records,
which decodes work, runs and bounds as the kernel does.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keel import key_order, masks, ops
from keel.kernels import flash_bwd, hopper_bwd_launch, hopper_dq_launch
from keel.kernels.blocked import backward as blocked_backward
from keel.key_records import KEYS
from keel.masks import AttnMask, AttnSlice
from keel.meta import Scoring
from keel.reference import attention

LOG2E = 1.4426950408889634

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def work_of(prepared: Any) -> Iterator[tuple[int, int]]:
    """(lane, tile) of each block of threads, or of each of its turns."""
    given = prepared.arguments
    num_lanes = given["num_lanes" if "num_lanes" in given else "num_heads"]
    tiles, section = given["TILES"].tolist(), given["section"]
    if getattr(given["FORM"], "together", False):
        (grid,) = prepared.grid
        stays = given["FORM"].persistent
        assert stays or grid == len(tiles) == given["num_tiles"] * num_lanes
        for place in range(grid):
            for work in itertools.count(place, grid):
                yield tiles[work][key_order.LANE], work
                if not stays or tiles[work + grid][1] == 0:
                    break
        return
    if not given["FORM"].persistent:
        section, num_tiles, sections = prepared.grid
        for z, y, x in itertools.product(range(sections), range(num_tiles), range(section)):
            yield z * section + x, y
        return
    (grid,) = prepared.grid
    in_a_section = given["num_tiles"] * section
    num_work = given["num_tiles"] * num_lanes
    for place in range(grid):
        for turn in itertools.count():
            work = turn * grid + (grid - 1 - place if turn & 1 else place)
            if work >= num_work:
                break
            in_section = work % in_a_section
            yield work // in_a_section * section + in_section % section, in_section // section


def added(given: Any, tensors: Any, head: int, rows: Any, keys: Any) -> Any:
    """Bias or ALiBi of (rows, keys), by the same strides, and with the same care for the ends."""
    form, tq = given["FORM"], given["tq"]
    flags = {"BIAS": form.has_bias, "SLOPES": form.has_alibi, "OFFSET": form.has_offset}
    assert {name: tensors[name] is not None for name in flags} == flags
    if form.has_bias:
        rows, keys = rows.clamp(max=tq - 1), keys.clamp(max=given["tk"] - 1)
        place = head * given["stride_bh"] + rows[:, None] * given["stride_bi"] + keys
        bias = tensors["BIAS"]
        numbers = bias.untyped_storage().nbytes() // bias.element_size() - bias.storage_offset()
        return bias.as_strided((numbers,), (1,))[place].double()
    if form.has_alibi:
        position = rows + given["tk"] - tq
        if form.has_offset:
            position = rows + tensors["OFFSET"][rows.clamp(max=tq - 1)]
        return -tensors["SLOPES"][head].double() * (position[:, None] - keys).abs()
    assert "tk" not in given and "stride_bh" not in given
    return 0.0


def probabilities(s: torch.Tensor, lse2: torch.Tensor, given: Any, more: Any) -> tuple[Any, Any]:
    """p of products s and of what is added to them, and p times the slope of the softcap."""
    form, scaled = given["FORM"], s * given["scale"] + more
    assert form.has_softcap == (given["softcap"] > 0)
    if not form.has_softcap:
        p = torch.exp2(scaled * LOG2E - lse2)
        return p, p
    tanh = torch.tanh(scaled / given["softcap"])
    p = torch.exp2(tanh * given["softcap"] * LOG2E - lse2)
    return p, p * (1 - tanh**2)


def behind_the_end(x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """x (tokens, heads, ...) with what a kernel finds behind its last token, up to a block."""
    return torch.cat([x.double(), x.new_full((128, *x.shape[1:]), fill, dtype=torch.float64)])


def walk(prepared: Any, tensors: dict[str, torch.Tensor]) -> None:
    """What hopper_bwd_kernel and hopper_bwd_wide_kernel do, on the same arguments."""
    given, form = prepared.arguments, prepared.arguments["FORM"]
    num_keys = form.parts * 64
    tq, tk = len(tensors["Q"]), len(tensors["K"])
    q, k, v, do = (behind_the_end(tensors[name]) for name in ("Q", "K", "V", "DO"))
    lse2, delta = (behind_the_end(tensors[name].T).T for name in ("LSE2", "DELTA"))
    lo, hi = (given[n].view(-1, num_keys) for n in ("KEY_LO", "KEY_HI"))
    tiles, runs = given["TILES"].tolist(), given["RUNS"].tolist()
    scale = given["scale"]
    assert given["tq"] == tq
    wide = max(q.shape[2], v.shape[2]) > 128
    assert set(prepared.left_out) == ({"DQ32"} if wide else set()) | (
        set() if form.staged else {"DK", "DV"}
    )
    assert form.with_dq == (tensors["DQ32"] is not None)
    for lane, y in work_of(prepared):
        key, key_end, first, split, last, whole = tiles[y][:6]
        way = tiles[y][key_order.STRIDE] // form.bm if form.together else 1
        assert abs(way) == 1
        if form.staged and whole:  # TMA clips at the end of the tensor
            assert key_end == min(key + num_keys, tk)
        kv_head = lane // given["splits"]
        keys = torch.arange(key, key + num_keys)
        dk, dv = (torch.zeros(len(keys), x.shape[2], dtype=x.dtype) for x in (k, v))
        for head in range(lane * given["heads_each"], (lane + 1) * given["heads_each"]):
            for run in range(first, last):
                begin, end, key_set, _ = runs[run]
                for row in range(begin, end, form.bm)[::way]:
                    rows = torch.arange(row, row + form.bm)
                    s = q[rows, head] @ k[keys, kv_head].T
                    more = added(given, tensors, head, rows, keys)
                    p, weight = probabilities(s, lse2[head, rows][:, None], given, more)
                    if run >= split:
                        low, high = lo[key_set], hi[key_set]
                        sees = (rows[:, None] >= low) & (rows[:, None] < high)
                        p, weight = (torch.where(sees, x, 0.0) for x in (p, weight))
                    ds = weight * (do[rows, head] @ v[keys, kv_head].T - delta[head, rows][:, None])
                    dv += p.T @ do[rows, head]
                    dk += ds.T @ q[rows, head]
                    if form.with_dq:  # TMA leaves out what is behind the end
                        dq = (ds @ k[keys, kv_head]).float()
                        tensors["DQ32"][row : row + form.bm, head] += dq[: max(tq - row, 0)]
        mine = slice(0, key_end - key)
        for out, grad in (("DK_OUT", dk * scale), ("DV_OUT", dv)):
            tensors[out][keys[mine], lane] = grad[mine].to(tensors[out].dtype)


def leave_dbias(given: Any, dbias: Any, ds: Any, own: Any, head: int, rows: Any, keys: Any) -> None:
    """Stores or adds what a block has for the gradient of the bias; own: its pairs."""
    form = given["FORM"]
    assert form.want_dbias == (dbias is not None) == ("stride_dbh" in given)
    if dbias is None:
        return
    place = head * given["stride_dbh"] + rows[:, None] * given["stride_dbi"] + keys
    flat, place = dbias.view(-1), place[own]
    flat.index_add_(0, place, ds[own].float())


def walk_queries(prepared: Any, tensors: dict[str, torch.Tensor]) -> None:
    """What hopper_bwd_dq_kernel does, on the same arguments."""
    given, form = prepared.arguments, prepared.arguments["FORM"]
    q, k, v, do = (behind_the_end(tensors[name]) for name in ("Q", "K", "V", "DO"))
    lse2 = behind_the_end(tensors["LSE2"].T, torch.inf).T
    delta = behind_the_end(tensors["DELTA"].T).T
    lo, hi = (given[n].view(-1, KEYS) for n in ("ROW_LO", "ROW_HI"))
    tiles, runs = given["TILES"].tolist(), given["RUNS"].tolist()
    assert prepared.left_out == (() if form.staged else ("DQ",))
    for head, y in work_of(prepared):
        row, row_end, first, split, last, row_set, *first_run = tiles[y]
        assert first_run == runs[first][:2] and (split == last or row_set == runs[split][2])
        rows = torch.arange(row, row + KEYS)
        dq = torch.zeros(len(rows), q.shape[2], dtype=q.dtype)
        for run in range(first, last):
            begin, end, row_set, _ = runs[run]
            for key in range(begin, end, form.bn):
                keys = torch.arange(key, key + form.bn)
                kv_head = head // given["group"]
                s = q[rows, head] @ k[keys, kv_head].T
                more = added(given, tensors, head, rows, keys)
                _, p = probabilities(s, lse2[head, rows][:, None], given, more)
                if run >= split:
                    low, high = lo[row_set, :, None], hi[row_set, :, None]
                    p = torch.where((keys >= low) & (keys < high), p, 0.0)
                ds = p * (do[rows, head] @ v[keys, kv_head].T - delta[head, rows][:, None])
                dq += ds @ k[keys, kv_head]
                own = (rows < row_end)[:, None].expand(-1, form.bn)
                if run >= split:
                    own = (keys >= low) & (keys < high)
                leave_dbias(given, tensors["DBIAS"], ds, own, head, rows, keys)
        mine = slice(0, row_end - row)
        alone = q.shape[1] == 1  # dq of one head is thrown away
        assert alone or tensors["DQ_OUT"][rows[mine], head].isnan().all()  # written once
        tensors["DQ_OUT"][rows[mine], head] = (dq * given["scale"])[mine].to(q.dtype).half()


DOCUMENTS = [(0, 130, 1), (130, 131, 1), (131, 300, 1), (300, 420, 0)]
MASKS = {
    "documents": AttnMask(  # the last one is full
        [AttnSlice.of_type((a, b), (a, b), kind) for a, b, kind in DOCUMENTS],
        *(420, 420),
    ),
    "window": masks.sliding_window(200, 333, left=70, right=3, sink_tokens=5),
    "two intervals": AttnMask(
        [AttnSlice(0, 150, 0, 40), AttnSlice(20, 200, 100, 260, hi=90), AttnSlice(0, 9, 0, 300)],
        *(210, 300),
    ),
    "tiny documents": masks.documents(range(0, 300, 17), causal=True),
    "nothing": AttnMask([], 70, 140),
}


def filled(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: AttnMask,
    scoring: Scoring,
    monkeypatch: Any,
    *,
    dbias: Any = None,
    sm_margin: int,
    turns: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], tuple[Any, ...], list[str]]:
    """(dq, dk, dv) of the walks, (dq, dk, dv, dbias) as they should be, and what was launched."""
    exact = [x.double() for x in (dout, q, k, v)]
    out, lse, _ = attention(*exact[1:], mask, scoring)
    delta = (exact[0] * out).sum(-1)
    expected = blocked_backward(
        *exact, lse, delta, mask, scoring, want_dbias=scoring.bias is not None
    )
    lse2 = torch.where(lse == -torch.inf, torch.inf, lse * LOG2E)
    launched = []

    def launch(kernel: Any, key: Any, tensors: Any, prepare: Any) -> None:
        launched.append(kernel.__name__)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        prepared = prepare()
        assert sm_margin == 0 or prepared.grid[0] <= 4 - sm_margin
        if kernel.__name__ == "hopper_bwd_kernel":
            expected_turn = key_order.TURN if turns else key_order.NO_TURNS
            assert prepared.arguments["turn"] == expected_turn
            form = prepared.arguments["FORM"]
            assert form.together == (turns or (sm_margin > 0 and form.with_dq))
        # right behind dk and dv, not behind sums for a bias; never where SMs are left to others
        behind_keys = len(launched) == 1 or (len(launched) == 2 and tensors["Q"].shape[1] > 1)
        assert prepared.early == (behind_keys and not prepared.arguments["FORM"].persistent)
        walks[kernel.__name__](prepared, tensors)

    walks = dict.fromkeys(("hopper_bwd_kernel", "hopper_bwd_wide_kernel"), walk)
    walks["hopper_bwd_dq_kernel"] = walk_queries
    monkeypatch.setattr(hopper_bwd_launch, "launch", launch)
    monkeypatch.setattr(hopper_dq_launch, "launch", launch)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    hopper_bwd_launch.backward(
        *(dout, q, k, v, lse2.T.float().contiguous(), delta.T.float().contiguous(), mask, scoring),
        **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
        **options,
        dbias=dbias,
        sm_margin=sm_margin,
    )
    return grads, expected, launched


@interpreted
@pytest.mark.parametrize(
    ("d", "dv", "splits", "margin", "deterministic", "softcap", "low"),
    [  # margins of 4 SMs
        (64, 64, 1, 0, False, 0.0, False),
        (128, 128, 1, 2, False, 0.0, False),
        (128, 128, 2, 0, True, 1.5, False),
        (96, 40, 4, 1, False, 0.0, True),
        (64, 64, 1, 1, True, 0.0, True),
        (64, 64, 1, 0, False, 0.7, False),
        (136, 128, 2, 0, False, 0.0, True),
        (192, 256, 1, 1, True, 2.0, False),
    ],
)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_the_records(
    name, d, dv, splits, margin, deterministic, softcap, low, monkeypatch
):
    """low: logits so far below 0 that a key behind the end, of logit 0, would be infinitely likely
    if it were not masked."""
    mask, hq, hk = MASKS[name], 4, 1 if d == 96 else 2
    torch.manual_seed(0)
    q = torch.randn(mask.tq, hq, d).half()
    k, v = torch.randn(mask.tk, hk, d).half(), torch.randn(mask.tk, hk, dv).half()
    if low:
        q, k = q * 0.1 + 8, k * 0.1 - 8
    dout = torch.randn(mask.tq, hq, dv).half()
    scoring = Scoring(scale=0.3 if low else d**-0.5, softcap=softcap)
    grads, expected, launched = filled(
        *(dout, q, k, v, mask, scoring, monkeypatch),
        **{"deterministic": deterministic, "sm_margin": margin, "splits": splits},
    )
    by_keys = "hopper_bwd_wide_kernel" if d > 128 else "hopper_bwd_kernel"
    apart = deterministic or d > 128
    assert launched == [by_keys, *(["hopper_bwd_dq_kernel"] if apart else [])]
    for ours, right in zip(grads, expected[:3], strict=True):
        # lse is fp32: where it is large, its last bit counts
        torch.testing.assert_close(ours.double(), right, rtol=2e-3, atol=1e-2 if low else 2e-3)
    nobody = ~mask.to_dense().any(0)
    assert (grads[1][nobody] == 0).all() and (grads[2][nobody] == 0).all()


@interpreted
@pytest.mark.parametrize(
    ("d", "hq", "hk", "margin"), [(128, 8, 2, 0), (64, 6, 3, 0), (64, 6, 3, 1)]
)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_heads_in_turns(name, d, hq, hk, margin, monkeypatch):
    mask, ways = MASKS[name], []
    monkeypatch.setattr(hopper_bwd_launch, "fastest_way", lambda *_, in_order: "together")
    in_order = key_order.in_order
    monkeypatch.setattr(
        key_order,
        "in_order",
        lambda *args, stay: ways.append(in_order(*args, stay=stay)) or ways[-1],
    )
    torch.manual_seed(0)
    q, dout = torch.randn(2, mask.tq, hq, d).half().unbind()
    k, v = torch.randn(2, mask.tk, hk, d).half().unbind()
    grads, expected, launched = filled(
        *(dout, q, k, v, mask, Scoring(scale=d**-0.5), monkeypatch),
        **{"deterministic": False, "sm_margin": margin, "splits": 1, "turns": True},
    )
    assert launched == ["hopper_bwd_kernel"]
    assert len(ways) == 1 and len(set(ways[0][:, key_order.LANE].tolist())) == hk
    for ours, right in zip(grads, expected[:3], strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=2e-3, atol=2e-3)


@interpreted
@pytest.mark.parametrize(
    ("name", "d", "dv", "term", "margin", "deterministic", "softcap"),
    [  # sizes of the bias: h heads, q and k all of them
        ("two intervals", 64, 64, "hqk", 0, False, 0.0),
        ("window", 128, 128, "1qk", 1, False, 1.5),
        ("two intervals", 128, 96, "h1k", 0, True, 0.0),
        ("tiny documents", 64, 64, "11k", 0, True, 0.7),
        ("window", 192, 128, "hqk", 0, True, 2.0),
        ("two intervals", 64, 64, "alibi", 0, False, 0.9),
        ("window", 96, 96, "offset", 1, True, 0.0),
        ("tiny documents", 256, 256, "offset", 0, False, 0.0),
    ],
)
def test_gradients_with_bias_and_alibi(
    name, d, dv, term, margin, deterministic, softcap, monkeypatch
):
    """The bias is cut out of a larger tensor: strides are its own. Behind its end lies a NaN."""
    mask, hq, hk = MASKS[name], 4, 2
    torch.manual_seed(1)
    q, dout = torch.randn(mask.tq, hq, d).half(), torch.randn(mask.tq, hq, dv).half()
    k, v = torch.randn(mask.tk, hk, d).half(), torch.randn(mask.tk, hk, dv).half()
    terms, dbias, num_launches = {}, None, 2
    if "k" in term:
        sizes = dict(zip("hqk", (hq, mask.tq, mask.tk), strict=True))
        shape = [sizes.get(size, 1) for size in term]
        room = torch.full((shape[0], shape[1] + 1, shape[2] + 3), torch.nan)
        terms["bias"] = room[:, : shape[1], : shape[2]].copy_(torch.randn(shape))
        dbias = torch.zeros(shape)
        num_launches += hq if deterministic and term != "hqk" else 0
    else:
        terms["alibi_slopes"] = torch.rand(hq) * 0.1
        if term == "offset":
            terms["alibi_offset"] = torch.randint(-90, 90, (mask.tq,), dtype=torch.int32)
    grads, expected, launched = filled(
        *(dout, q, k, v, mask, Scoring(scale=d**-0.5, softcap=softcap, **terms), monkeypatch),
        **{"dbias": dbias, "deterministic": deterministic, "sm_margin": margin, "splits": 1},
    )
    assert len(launched) == num_launches
    for ours, right in zip([*grads, dbias], expected, strict=True):
        if right is not None:
            torch.testing.assert_close(ours.double(), right, rtol=2e-3, atol=2e-3)


@interpreted
@pytest.mark.parametrize("heads", [(6, 6), (6, 3)])
@pytest.mark.parametrize("margin", [0, 1])
@pytest.mark.parametrize("small", [False, True])
def test_heads_in_sections(heads, margin, small, monkeypatch):
    """Fewer at once where the L2 is too small for all of them, and none share their keys."""
    monkeypatch.setattr(hopper_bwd_launch, "l2_bytes", lambda _: 1 << (10 if small else 40))
    sections = []
    choose = hopper_bwd_launch.choose_section
    chosen = lambda *given: sections.append(choose(*given)) or sections[-1]  # noqa: E731
    monkeypatch.setattr(hopper_bwd_launch, "choose_section", chosen)
    mask, (hq, hk) = masks.causal(300), heads
    torch.manual_seed(0)
    q, dout = torch.randn(2, 300, hq, 64).half()
    k, v = torch.randn(2, 300, hk, 64).half()
    grads, expected, _ = filled(
        *(dout, q, k, v, mask, Scoring(scale=0.125), monkeypatch), sm_margin=margin, splits=1
    )
    for ours, right in zip(grads, expected[:3], strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=2e-3, atol=2e-3)
    assert len(sections) == (small and hq == hk)
    assert all(6 % section == 0 and section < 6 for section in sections)


def test_splits_that_do_not_divide_are_refused():
    q, k = torch.zeros(4, 6, 64).half(), torch.zeros(4, 2, 64).half()
    rows = torch.zeros(6, 4)
    with pytest.raises(ValueError, match="3 query heads of a key head: 2"):
        hopper_bwd_launch.backward(
            *(q, q, k, k, rows, rows, masks.full(4), Scoring(scale=1.0)),
            **{"dq": q.clone(), "dk": k.clone(), "dv": k.clone()},
            splits=2,
        )


def test_no_keys_give_zeros():
    q, k = torch.ones(4, 6, 64).half(), torch.ones(0, 2, 64).half()
    rows, dq = torch.zeros(6, 4), torch.full((4, 6, 64), torch.nan)
    hopper_bwd_launch.backward(
        *(q, q, k, k, rows, rows, masks.full(4, 0), Scoring(scale=1.0)),
        **{"dq": dq, "dk": k.clone(), "dv": k.clone()},
    )
    assert (dq == 0).all()


@pytest.mark.parametrize(
    ("options", "problem", "expected"),
    [
        ({}, None, "hopper"),
        ({"bias": torch.zeros(1, 4, 4)}, None, "hopper"),
        ({"bias": torch.zeros(1, 4, 4), "deterministic": True}, None, "hopper"),
        ({"bias": torch.zeros(1, 4, 4)}, "no registers", "portable"),
        ({}, "bias and ALiBi are not supported", "portable"),
        ({"deterministic": True}, None, "hopper"),
        ({"sm_margin": 4}, None, "hopper"),
        ({"backend": "triton"}, None, "portable"),
        ({"backend": "auto"}, None, "hopper"),
        ({"backend": "auto"}, "bias and ALiBi are not supported", "portable"),
    ],
)
def test_who_fills_gradients(options, problem, expected, monkeypatch):
    called = []

    def note(name: str) -> Any:
        return lambda *args, **options: called.append((name, options))

    monkeypatch.setattr(hopper_bwd_launch, "backward_problem", lambda *args: problem)
    monkeypatch.setattr(hopper_bwd_launch, "backward", note("hopper"))
    monkeypatch.setattr(flash_bwd, "backward", note("portable"))
    rows = torch.zeros(2, 4)
    zeroed, let_begin = [], []

    def row_terms(*args: Any, dq32: Any, next_is_early: bool, steps: Any) -> Any:
        zeroed.append(dq32)
        let_begin.append(next_is_early)
        return rows, rows

    monkeypatch.setattr(flash_bwd, "row_terms", row_terms)
    x = torch.zeros(4, 2, 64).half()
    wanted = {"deterministic": False, "sm_margin": 0, "backend": "hopper"} | options
    bias = wanted.pop("bias", None)
    dbias = ops.gradients(
        *(x, None, x, x, x, x, rows.T, masks.full(4), Scoring(scale=1.0, bias=bias)),
        **{"want_dbias": bias is not None, "dtype": x.dtype},
        **wanted,
    )[4]
    [(name, given)] = called
    assert name == expected
    assert let_begin == [expected == "hopper"]
    assert given["sm_margin"] == wanted["sm_margin"]
    assert given["deterministic"] == wanted["deterministic"]
    assert given["dbias"] is dbias
    if bias is not None:
        assert dbias.shape == bias.shape and (dbias == 0).all() and dbias.dtype == torch.float32
    if expected == "hopper":
        assert given["apart"] == (wanted["deterministic"] or bias is not None)
    if expected == "hopper" and not given["apart"]:  # sums begin at zeros
        assert given["dq32"] is zeroed[0] and zeroed[0].dtype == torch.float32
    else:
        assert zeroed == [None]
