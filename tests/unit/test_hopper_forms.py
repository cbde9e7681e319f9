"""What the Hopper forward is compiled for, and what it refuses to be."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton import knobs
from triton.experimental.gluon._runtime import GluonASTSource

from keel import _versions, masks
from keel.kernels import (
    hopper_common,
    hopper_dq_launch,
    hopper_forms,
    hopper_fwd,
    hopper_launch,
    launch,
)
from keel.kernels.hopper_launch import choose_form
from keel.kernels.hopper_tiles import three_are_faster
from keel.meta import Scoring
from keel.tile_records import best_records


def test_consumers_decide_the_rows_of_a_tile():
    for consumers, rows in ((2, 128), (3, 192)):
        form = choose_form(64, 40, 128, out_matches=True, want_max=True, consumers=consumers)
        assert (form.rows, form.consumers) == (rows, consumers)
    assert choose_form(128, 128, 128, out_matches=True).rows == 128


def test_kernels_compiled_for_other_properties_are_not_found(monkeypatch):
    form = choose_form(256, 256, 64, out_matches=True)

    def key() -> str:
        kernel = hopper_fwd.hopper_fwd_kernel
        place = (kernel.arg_names.index("FORM"),)
        return GluonASTSource(kernel, {"FORM": "constexpr"}, constexprs={place: form}).hash()

    before = key()
    assert key() == before
    monkeypatch.setattr(type(form), "producer_registers", property(lambda self: 40))
    assert key() != before


@pytest.mark.parametrize("held", [True, False])
def test_wide_tiles_are_carried_where_registers_hold_them(monkeypatch, held):
    monkeypatch.setattr(hopper_forms, "holds_wide_tiles", lambda: held)

    def wide(d: int = 256, dv: int = 256, out_matches: bool = True, **options: bool):
        return choose_form(d, dv, 64, out_matches=out_matches, **options)

    for form in (wide(), wide(want_max=True), wide(has_sink=True, want_max=True)):
        assert (form.carries, form.spools, form.at_once) == (held, True, False)
    unlike = wide(out_matches=False)
    assert (unlike.carries, unlike.spools, unlike.at_once) == (held, False, held)
    assert not wide(accumulate=True).spools and not wide(128, 128).spools
    assert not wide(has_softcap=True).spools and wide(192, 128, has_softcap=True).spools
    for option in ("cuts", "accumulate", "has_softcap"):
        assert not wide(**{option: True}).carries
    for dims in ((192, 192), (256, 192), (256, 128), (128, 256)):
        assert not wide(*dims).carries
    small = wide(128, 128, accumulate=True)  # two buffers of queries: always, but by 64 columns
    assert (small.carries, small.at_once) == (True, False)


@pytest.mark.parametrize(
    ("question", "yes", "no"),
    [
        ("holds_wide_tiles", ("3.6.0", "3.7.1"), ("3.8.0", "3.9.0")),
        ("keeps_addresses", ("3.6.0", "3.8.0", "3.9.0"), ("3.7.1",)),
        ("wastes_registers", ("3.8.0",), ("3.6.0", "3.7.1", "3.9.0", "4.0.0")),
        ("copies_operands", ("3.9.0", "4.0.0"), ("3.6.0", "3.7.1", "3.8.0")),
        ("goes_on_after_products", ("3.6.0", "3.8.1"), ("3.9.0", "4.0.0")),
    ],
)
def test_what_is_known_of_versions_of_triton(monkeypatch, question, yes, no):
    import triton

    for version in yes + no:
        monkeypatch.setattr(triton, "__version__", version)
        answer = getattr(_versions, question).__wrapped__()
        assert answer is (version in yes), version


@pytest.mark.parametrize("keeps", [True, False])
def test_fullest_loops_make_addresses_anew_where_none_is_kept(monkeypatch, keeps):
    monkeypatch.setattr(hopper_forms, "keeps_addresses", lambda: keeps)
    options = {"has_softcap": True, "want_max": True, "cuts": True}
    assert choose_form(256, 256, 64, out_matches=True, **options).seeks is not keeps
    for option in options:
        fewer = options | {option: False}
        assert not choose_form(256, 256, 64, out_matches=True, **fewer).seeks
    assert not choose_form(128, 128, 64, out_matches=True, **options).seeks


@pytest.mark.parametrize(("keeps", "wastes"), [(True, False), (False, False), (True, True)])
def test_out_of_sixteen_heads_in_parts_leaves_without_tma_where_it_takes_a_word(
    monkeypatch, keeps, wastes
):
    monkeypatch.setattr(hopper_launch, "keeps_addresses", lambda: keeps)
    monkeypatch.setattr(hopper_launch, "wastes_registers", lambda: wastes)

    def staged(d: int = 128, bn: int = 128, pack: int = 16, **options: bool) -> bool:
        return choose_form(d, d, bn, out_matches=True, pack=pack, **options).staged

    for d, bn in product((96, 128), (64, 128)):
        assert staged(d, bn, cuts=True) is staged(d, bn, cuts=True, has_sink=True)
        assert staged(d, bn, cuts=True) is (keeps and not wastes)
    assert staged(cuts=True, want_max=True) and staged() and staged(64, cuts=True)
    assert all(staged(pack=pack, cuts=True) for pack in (1, 2, 4, 8, 32, 64))


@pytest.mark.parametrize("copies", [True, False])
def test_what_has_no_register_for_addresses_is_not_staged(monkeypatch, copies):
    """Results of three consumers, where operands take registers that others have."""
    monkeypatch.setattr(hopper_launch, "copies_operands", lambda: copies)

    def staged(consumers: int, **options: bool) -> bool:
        return choose_form(64, 64, 128, out_matches=True, consumers=consumers, **options).staged

    assert staged(2) and staged(3) is not copies
    assert not staged(2, accumulate=True) and not staged(3, accumulate=True)


@pytest.mark.parametrize("copies", [True, False])
def test_blocks_of_dq_are_what_registers_hold(monkeypatch, copies):
    monkeypatch.setattr(hopper_dq_launch, "copies_operands", lambda: copies)
    both, one = (64, 128), (64,)
    assert hopper_dq_launch.dq_block_ns(128, 96, True, False) == (one if copies else both)
    assert hopper_dq_launch.dq_block_ns(128, 128, False, False) == both
    assert hopper_dq_launch.dq_block_ns(64, 64, True, False) == both
    assert hopper_dq_launch.dq_block_ns(64, 64, False, True) == one
    assert hopper_dq_launch.dq_block_ns(64, 136, False, False) == one


@pytest.mark.parametrize(("wastes", "copies"), [(False, False), (True, False), (False, True)])
def test_parts_of_wide_tiles_are_spooled_where_they_have_registers(monkeypatch, wastes, copies):
    monkeypatch.setattr(hopper_launch, "wastes_registers", lambda: wastes)
    monkeypatch.setattr(hopper_launch, "copies_operands", lambda: copies)

    def spools(d: int, dv: int, **options: bool) -> bool:
        return choose_form(d, dv, 64, out_matches=True, **options).spools

    assert spools(256, 256, cuts=True) is not (wastes or copies)
    assert spools(256, 128, cuts=True) and spools(64, 256, cuts=True)
    assert spools(256, 256) and spools(192, 192) and not spools(128, 128)


def test_registers_where_operands_are_copied(monkeypatch):
    """Each of these is the one number with which Triton 3.9 keeps nothing on the stack."""
    monkeypatch.setattr(hopper_forms, "copies_operands", lambda: True)
    monkeypatch.setattr(hopper_forms, "wastes_registers", lambda: False)
    monkeypatch.setattr(hopper_forms, "keeps_addresses", lambda: True)

    def wide(dv: int, **options: bool) -> hopper_forms.Form:
        return choose_form(256, dv, 64, out_matches=False, has_softcap=True, **options)

    for accumulate in (True, False):
        full = wide(256, want_max=True, accumulate=accumulate)
        assert full.caps_anew and full.producer_registers == 24
        cut = wide(256, want_max=True, cuts=True, accumulate=accumulate)
        assert not cut.caps_anew and cut.producer_registers == 32
        assert wide(256, cuts=True, accumulate=accumulate).producer_registers == 24
        assert wide(128, cuts=True, accumulate=accumulate).producer_registers == 32
    assert not wide(256).caps_anew and not wide(128, want_max=True).caps_anew


@pytest.mark.parametrize("wastes", [True, False])
def test_parts_of_packed_heads_have_more_registers_where_they_are_wasted(monkeypatch, wastes):
    monkeypatch.setattr(hopper_forms, "wastes_registers", lambda: wastes)
    monkeypatch.setattr(hopper_forms, "copies_operands", lambda: False)

    def producer(bn: int = 128, dv: int = 128, pack: int = 4, cuts: bool = True) -> int:
        form = choose_form(128, dv, bn, out_matches=True, pack=pack, cuts=cuts)
        return form.producer_registers

    assert producer() == producer(pack=2) == producer(pack=64) == (24 if wastes else 32)
    assert producer(bn=64) == producer(dv=64) == producer(pack=1) == producer(cuts=False) == 32


@pytest.mark.parametrize(("wastes", "copies"), [(False, False), (True, False), (False, True)])
def test_what_the_backward_has_no_register_for_is_made_anew(monkeypatch, wastes, copies):
    monkeypatch.setattr(hopper_forms, "wastes_registers", lambda: wastes)
    monkeypatch.setattr(hopper_forms, "copies_operands", lambda: copies)
    assert hopper_forms.QueryForm(128, 128, 128, 128).asks_anew is (wastes or copies)

    def narrow(d: int, **options: bool) -> hopper_forms.BackwardForm:
        return hopper_forms.BackwardForm(d, 8192 // d, d, d, has_softcap=True, **options)

    assert narrow(64, has_alibi=True, persistent=True).asks_anew is (wastes or copies)
    assert not narrow(64, has_alibi=True).asks_anew and not narrow(64, persistent=True).asks_anew
    assert not narrow(128, has_alibi=True, persistent=True).asks_anew
    assert narrow(64, has_bias=True).second_registers == (248 if copies else 240)
    assert narrow(64).second_registers == narrow(128, has_bias=True).second_registers == 240


@pytest.mark.parametrize("goes_on", [True, False])
def test_two_consumers_run_one_code_where_none_stops_for_the_other(monkeypatch, goes_on):
    monkeypatch.setattr(hopper_forms, "goes_on_after_products", lambda: goes_on)

    def form(d: int = 128, bn: int = 128, **options):
        return choose_form(d, d, bn, out_matches=True, **options)

    for one in (form(), form(64, 64), form(96, want_max=True), form(accumulate=True)):
        assert (one.one_code, one.codes) == ((True, 1) if goes_on else (False, 2))
        assert one.codes * one.own_rows == one.rows == 128 and one.own_rows == 16 * one.warps
        assert (one.sent_rows, one.arrivals) == ((16, 8) if goes_on else (64, 8))
    for apart in (form(cuts=True), form(pack=8), form(256, 64), form(64, consumers=3)):
        assert not apart.one_code and apart.warps == 4
        assert apart.codes == apart.consumers and apart.arrivals == 4 * apart.consumers


@pytest.mark.parametrize("goes_on", [True, False])
def test_small_blocks_have_four_stages_where_barriers_suffice(monkeypatch, goes_on):
    monkeypatch.setattr(hopper_forms, "goes_on_after_products", lambda: goes_on)

    def form(d: int = 128, dv: int = 128, bn: int = 64, **options):
        return choose_form(d, dv, bn, out_matches=True, **options)

    for four in (form(), form(96, 96), form(want_max=True), form(accumulate=True)):
        assert (four.stages, four.keys_free) == ((4, 8) if goes_on else (3, 9))
    small = [form(64, 64), form(64, 128), form(128, 64)]
    for three in (*small, form(pack=8), form(cuts=True), form(has_softcap=True)):
        assert (three.stages, three.keys_free) == (3, 9)
    assert (form(bn=128).stages, form(bn=128).keys_free) == (2, 9)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_take_turns_and_change_their_phase(stages):
    of = SimpleNamespace(STAGES=stages)
    for count in range(3 * stages):
        place = hopper_common.stage_of.fn(count, of), hopper_common.phase_of.fn(count, of)
        assert place == (count % stages, count // stages % 2)


@pytest.mark.parametrize(
    ("dims", "bn", "queries_at", "places_at"),
    [  # queries, keys, values and PLACES in KiB, as Triton laid them down
        ((128, 128), 128, 0, 64 + 64 + 64),
        ((128, 128), 64, 0, 64 + 64 + 64),
        ((64, 64), 64, 0, 32 + 24 + 24),
        ((64, 128), 64, 48, 48 + 32 + 24),  # values are larger than queries
        ((256, 256), 64, 0, 64 + 64 + 64),
        ((192, 128), 64, 0, 48 + 48),  # PLACES, 34, are larger than values
        ((192, 128), 128, 96 + 64, 96 + 64 + 48),  # keys and values are larger than queries
        ((64, 256), 64, 64 + 34, 64),
    ],
)
def test_larger_arrays_are_laid_down_first(monkeypatch, dims, bn, queries_at, places_at):
    monkeypatch.setattr(hopper_forms, "goes_on_after_products", lambda: True)
    form = choose_form(*dims, bn, out_matches=True)
    assert (form.queries_at, form.places_at) == (1024 * queries_at, 1024 * places_at)
    spooled = 0 if not form.spools else 16 if (dims, bn) == ((192, 128), 128) else 32
    assert form.places == (2 + spooled) * 128


@pytest.mark.parametrize(
    ("d", "columns", "panels", "depth"),
    [
        *((64, 64, 1, 0), (65, 128, 1, 80), (80, 128, 1, 80), (88, 128, 1, 96), (96, 128, 1, 96)),
        *((104, 128, 1, 0), (128, 128, 1, 0), (136, 192, 3, 0), (192, 192, 3, 0)),
        *((200, 256, 1, 0), (256, 256, 1, 0)),
    ],
)
def test_scores_are_made_of_few_columns_beyond_a_head(d, columns, panels, depth):
    form = choose_form(d, 64, 64, out_matches=True)
    assert (form.d, form.panels, form.depth) == (columns, panels, depth)
    assert d <= (form.depth or form.d)


def test_blocks_of_128_keys_where_shared_memory_holds_them():
    both = [(64, 64), (128, 128), (96, 96), (192, 128), (136, 64), (64, 128), (192, 40)]
    for dims in both:
        assert hopper_launch.block_ns(*dims, False) == (64, 128)
        assert hopper_launch.block_ns(*dims, True) == (64,)
    for dims in ((192, 192), (200, 64), (256, 128), (128, 136), (64, 256), (256, 256)):
        assert hopper_launch.block_ns(*dims, False) == (64,)
    form = choose_form(192, 128, 128, out_matches=True)
    assert form.turns and form.halves and form.skips and form.bits
    small = choose_form(192, 128, 64, out_matches=True)
    assert not (small.turns or small.halves or small.skips or small.bits)
    assert not choose_form(256, 128, 64, out_matches=True).skips
    assert not choose_form(192, 64, 128, out_matches=True).skips


SET_UP = 'asm "@$0 mbarrier.init.shared::cta.b64 [$1], 1;"(i1 %1, ptr addrspace(3) {})\n'
BEFORE = "bar.sync \t0, 256;\nwgmma.mma_async.sync a;\n"


def check_compiled(
    *places: str, ptx: str = BEFORE, dims=(128, 128), bn=128, paired=False, **options
) -> None:
    form = replace(choose_form(*dims, bn, out_matches=True, **options), paired=paired)
    llir = "".join(SET_UP.format(place) for place in places)
    hopper_launch.check_compiled(form, SimpleNamespace(asm={"llir": llir, "ptx": ptx}))


def test_what_kernels_take_for_granted_is_looked_at(monkeypatch):
    monkeypatch.setattr(hopper_forms, "goes_on_after_products", lambda: True)

    def at(place: int) -> str:
        return f"getelementptr (i8, ptr addrspace(3) @global_smem, i32 {place})"

    first, barriers = "@global_smem", at(196608)
    check_compiled(first, barriers, ptx=BEFORE + "bar.sync \t%r1, 256;\nbar.sync \t1;\n")
    for wrong in ((at(64), barriers), (first, at(196616)), (first,), (first, barriers, at(8))):
        with pytest.raises(RuntimeError, match=r"queries and barriers at .*nothing was launched"):
            check_compiled(*wrong)
        with pytest.raises(RuntimeError, match="queries and barriers at"):
            check_compiled(*wrong, cuts=True)
    for stop in ("bar.sync \t0, 256;", "barrier.sync \t0;", "barrier.cta.sync.aligned 0, 256;"):
        with pytest.raises(RuntimeError, match="stops all warps in a tile"):
            check_compiled(first, barriers, ptx=BEFORE + stop)
        check_compiled(first, barriers, ptx=BEFORE + stop, cuts=True)  # four warps have it alone
    for bn, taken in ((64, 6), (128, 7)):
        own = BEFORE + f"barrier.cta.arrive.aligned \t{taken}, 32;\n"
        with pytest.raises(RuntimeError, match=rf"take named barrier {taken}; .* from {taken}:"):
            check_compiled(first, barriers, ptx=own, bn=bn)
        check_compiled(first, barriers, ptx=own.replace(f"{taken},", f"{taken - 1},"), bn=bn)
        check_compiled(first, barriers, ptx=own, cuts=True)
    with pytest.raises(RuntimeError, match="has no named barriers that could be found"):
        check_compiled(first, barriers, ptx="wgmma.mma_async.sync a;")
    with pytest.raises(RuntimeError, match=r"no products.*nothing was launched"):
        check_compiled(first, barriers, ptx="no product is found in it")
    check_compiled(at(49152), at(106496), dims=(64, 128), bn=64)
    with pytest.raises(RuntimeError, match=r"queries and barriers at \[0, 106496\]"):
        check_compiled(first, at(106496), dims=(64, 128), bn=64)


def test_sums_that_are_scaled_anew_where_they_must():
    def form(d: int, dv: int, **options) -> hopper_forms.Form:
        return choose_form(d, dv, 64, out_matches=True, **options)

    for dims in ((128, 128), (96, 96), (64, 128), (192, 128), (256, 256)):
        assert form(*dims).lazy and form(*dims, want_max=True, has_sink=True).lazy
        assert not form(*dims, has_softcap=True).lazy and not form(*dims, cuts=True).lazy
    assert not form(128, 128, pack=8).lazy
    assert not any(form(*dims).lazy for dims in ((64, 64), (128, 64), (256, 64)))


@pytest.mark.parametrize("scarce", [True, False])
def test_bounds_are_read_again_where_highest_scores_take_their_registers(monkeypatch, scarce):
    """With Triton 3.7."""
    monkeypatch.setattr(hopper_forms, "keeps_addresses", lambda: not scarce)
    for more in ({}, {"has_sink": True}):
        assert choose_form(256, 256, 64, out_matches=True, want_max=True, **more).rereads is scarce
        assert not choose_form(256, 256, 64, out_matches=True, **more).rereads
    for dims in ((192, 192), (256, 128), (128, 128)):
        assert not choose_form(*dims, 64, out_matches=True, want_max=True).rereads


def test_a_kernel_that_does_not_pass_is_not_launched():
    launched = []

    class Kernel:
        arg_names, __name__ = ("X",), "some_kernel"

        def warmup(self, *arguments, grid, **options):
            assert grid == (3,) and options["num_warps"] == 8
            return "compiled"

        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append(grid)

    def refuse(compiled):
        assert compiled == "compiled"
        raise RuntimeError("not this one")

    tensors = {"X": torch.zeros(1)}
    prepared = launch.Prepared((3,), {}, num_warps=8, check=refuse)
    with pytest.raises(RuntimeError, match="not this one"):
        launch.Recipe(Kernel(), prepared, tensors, aligned=True)._run(tensors)
    assert not launched


@pytest.mark.parametrize("dims", [(128, 128), (64, 128), (65, 64)])
def test_three_consumers_need_small_heads(dims):
    with pytest.raises(ValueError, match=r"consumers=3 with head dims"):
        choose_form(*dims, 64, out_matches=True, consumers=3)
    with pytest.raises(ValueError, match=r"consumers=4"):
        choose_form(64, 64, 64, out_matches=True, consumers=4)


def test_turns_need_the_barriers_of_a_third_stage():
    assert choose_form(64, 64, 128, out_matches=True, turns=True).stages == 2
    with pytest.raises(ValueError, match="turns"):
        choose_form(64, 64, 64, out_matches=True, turns=True)


@pytest.mark.parametrize(
    ("mask", "heads", "three"),
    [
        (masks.full(16384), 32, True),
        (masks.full(8192), 32, True),
        (masks.full(4096), 32, False),  # six turns of 132 SMs, and the last one mostly empty
        (masks.causal(16384), 32, True),
        (masks.causal(8192), 64, True),
        (masks.causal(4096), 64, False),  # too many blocks are partial
        (masks.sliding_window(32768, left=1024), 64, False),
        (masks.documents(range(0, 32769, 4096)), 64, True),
        (masks.documents(range(0, 32769, 4096), causal=True), 64, False),
        (masks.full(16384, 100), 32, False),  # one block of keys, and that is partial
        (masks.full(0, 64), 32, False),
    ],
)
def test_three_consumers_where_few_blocks_are_partial(mask, heads, three):
    narrow, wide = best_records(mask, (64, 128)), best_records(mask, (128,), 192)
    assert three_are_faster(narrow, wide, heads, 132) is three


def test_the_producer_raises_maxima_where_it_waits_for_tiles():
    small, large = ((64, 64, 128), (256, 256, 64))
    assert choose_form(*small, out_matches=True, want_max=True).tops
    assert not choose_form(*small, out_matches=True, want_max=False).tops
    assert not choose_form(*large, out_matches=True, want_max=True).tops


def test_halves_are_skipped_where_there_are_registers_for_it():
    dims = (128, 128, 128)
    assert choose_form(*dims, out_matches=True, want_max=True, cuts=True).skips
    assert choose_form(*dims, out_matches=True).skips
    assert not choose_form(*dims, out_matches=True, cuts=True).skips
    assert not choose_form(*dims, out_matches=False, want_max=True).skips
    assert choose_form(*dims, out_matches=True, want_max=True, accumulate=True).skips
    assert not choose_form(96, 96, 128, out_matches=True, want_max=True, accumulate=True).skips


@pytest.mark.parametrize(
    ("wastes", "dtype", "accumulate", "consumers"),
    [
        (False, torch.bfloat16, False, 3),
        (False, torch.float32, True, 3),
        (True, torch.bfloat16, False, 2),
        (True, torch.float32, True, 2),
    ],
)
def test_three_consumers_where_they_have_registers(
    monkeypatch, wastes, dtype, accumulate, consumers
):
    monkeypatch.setattr(hopper_launch, "wastes_registers", lambda: wastes)
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_launch, "work_counter", lambda kind, device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    given = {}
    monkeypatch.setattr(hopper_launch, "launch", lambda *args: given.update(prepare=args[3]))
    q = torch.empty(8192, 32, 64, dtype=torch.bfloat16)
    out, lse = torch.empty(q.shape, dtype=dtype), torch.empty(32, 8192)
    hopper_launch.forward(
        *(q, q, q, masks.full(8192), Scoring(scale=1.0)),
        out=out,
        lse=lse,
        accumulate=accumulate,
    )
    made = given["prepare"]()
    assert made.hopper and made.arguments["FORM"].consumers == consumers


@pytest.mark.parametrize(
    ("mask", "d", "softcap", "held", "spools"),
    [
        (masks.full(8192), 256, 0.0, True, False),
        (masks.causal(16384), 256, 0.0, True, False),
        (masks.full(2048), 256, 0.0, True, True),
        (masks.full(4096), 256, 0.0, True, True),
        (masks.causal(8192), 256, 0.0, True, True),
        (masks.sliding_window(32768, left=1024), 256, 0.0, True, True),
        (masks.full(8192), 256, 0.0, False, True),  # what is not carried has no faster loop
        (masks.full(8192), 192, 0.0, True, True),
        (masks.full(8192), 256, 5.0, True, False),  # never
    ],
)
def test_results_of_long_tiles_are_written_as_they_lie(monkeypatch, mask, d, softcap, held, spools):
    monkeypatch.setattr(hopper_forms, "holds_wide_tiles", lambda: held)
    made = prepared_for_h200(monkeypatch, mask, d, Scoring(scale=1.0, softcap=softcap))
    form = made.arguments["FORM"]
    assert form.spools is spools and ("O" in made.left_out) is not spools
    assert ("O" in made.streamed) is spools


@pytest.mark.parametrize(
    ("mask", "d", "softcap", "paced"),
    [
        (masks.full(65536), 256, 0.0, True),
        (masks.full(131072), 128, 0.0, True),
        (masks.documents([0, 65536, 131072], causal=False), 256, 0.0, True),
        (masks.full(32768), 256, 0.0, False),  # the L2 holds what a tile reads
        (masks.full(65536), 128, 0.0, False),
        (masks.documents(range(0, 131073, 16384), causal=False), 256, 0.0, False),
        (masks.causal(131072), 256, 0.0, False),  # tiles are of all lengths
        (masks.full(131072), 192, 0.0, False),  # never
        (masks.full(65536), 256, 5.0, False),
    ],
)
def test_even_tiles_that_read_more_than_the_l2_holds_begin_together(
    monkeypatch, mask, d, softcap, paced
):
    made = prepared_for_h200(monkeypatch, mask, d, Scoring(scale=1.0, softcap=softcap))
    assert made.arguments["FORM"].paced is paced


def prepared_for_h200(monkeypatch, mask, d, scoring, heads=64, kv_heads=64, *, margin=0):
    """A launch on a GPU that need not be there."""
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_launch, "l2_bytes", lambda device: 60 << 20)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(hopper_launch, "describing", lambda x, *_: None)
    q, k = (
        torch.empty(1, n, d, dtype=torch.bfloat16).expand(mask.tq, n, d) for n in (heads, kv_heads)
    )
    tiles = hopper_launch._tiles_for(q, k, mask, scoring, None)
    assert tiles.cut is None
    out = torch.empty(mask.tq, heads, d, dtype=torch.bfloat16, device="meta")
    return hopper_launch._prepare(q, k, k, tiles, scoring, out, None, False, margin, None)


@pytest.mark.parametrize(
    ("wastes", "d", "softcap", "wants_max", "is_cut"),
    [
        (False, 256, 5.0, True, True),
        (True, 256, 5.0, True, False),
        (True, 256, 5.0, False, True),
        (True, 256, 0.0, True, True),
        (True, 224, 5.0, True, False),
        (True, 192, 5.0, True, True),
        (True, 128, 5.0, True, True),
    ],
)
def test_tiles_are_cut_where_parts_have_registers(
    monkeypatch, wastes, d, softcap, wants_max, is_cut
):
    monkeypatch.setattr(hopper_launch, "wastes_registers", lambda: wastes)
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_launch, "work_counter", lambda kind, device: None)
    monkeypatch.setattr(hopper_launch, "between_parts", lambda numbers, device: {})
    given = {}
    monkeypatch.setattr(hopper_launch, "_prepare", lambda *args: given.update(tiles=args[3]))
    monkeypatch.setattr(hopper_launch, "launch", lambda *args: args[3]())
    q = torch.empty(128, 4, d, dtype=torch.bfloat16)
    k = torch.empty(1, 4, d, dtype=torch.bfloat16).expand(8192, 4, d)
    hopper_launch.forward(
        *(q, k, k, masks.full(128, 8192), Scoring(scale=1.0, softcap=softcap)),
        out=torch.empty_like(q),
        lse=torch.empty(4, 128),
        max_logits=torch.empty(4) if wants_max else None,
    )
    assert (given["tiles"].cut is not None) == is_cut


def test_another_ptxas_is_taken_while_a_kernel_compiles(monkeypatch):
    usual, key = knobs.nvidia.ptxas_blackwell.path, "TRITON_PTXAS_BLACKWELL_PATH"
    other = knobs.nvidia.ptxas.path
    assert Path(usual) != Path(other) and key not in os.environ
    monkeypatch.setattr(_versions, "_other_ptxas", lambda: (other, {"ptx_version": 88}))
    with _versions.sparing_ptxas(False) as options:
        assert options == {} and knobs.nvidia.ptxas_blackwell.path == usual
    with pytest.raises(KeyError), _versions.sparing_ptxas() as options:
        assert options == {"ptx_version": 88} and knobs.nvidia.ptxas_blackwell.path == other
        with _versions.sparing_ptxas():  # threads wait for each other, a thread not for itself
            assert knobs.nvidia.ptxas_blackwell.path == other
        raise KeyError
    assert knobs.nvidia.ptxas_blackwell.path == usual and key not in os.environ


def test_kernels_are_not_compiled_by_the_ptxas_of_torch(monkeypatch, tmp_path):
    """torch.compile sets it for the process; one that the user set stays."""
    usual, key = knobs.nvidia.ptxas, "TRITON_PTXAS_PATH"
    torchs, users = tmp_path / "torch/bin/ptxas", tmp_path / "bin/ptxas"
    for path in (torchs, users):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        path.chmod(0o755)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    for path, taken in ((torchs, usual.path), (users, str(users))):
        monkeypatch.setenv(key, str(path))
        assert knobs.nvidia.ptxas.version == "13.0"
        with _versions.sparing_ptxas():
            assert knobs.nvidia.ptxas.path == taken
        assert (knobs.nvidia.ptxas.path, os.environ[key]) == (str(path), str(path))
    monkeypatch.setenv(key, str(torchs))
    monkeypatch.setitem(vars(knobs.nvidia), "ptxas", str(users))  # asked before the environment
    with _versions.sparing_ptxas():
        assert knobs.nvidia.ptxas.path == str(users)


def test_a_chosen_ptxas_stays(monkeypatch):
    """With two of them, the older is taken, unless the user has a say."""
    from triton.backends.nvidia import compiler

    class Tool:
        def __init__(self, version: str) -> None:
            self.path, self.version = f"/{version}/ptxas", version

    class Knobs:
        ptxas, ptxas_blackwell = Tool("12.9"), Tool("13.4")

    usual = Knobs.ptxas_blackwell
    monkeypatch.setattr(knobs, "nvidia", Knobs())
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: usual)
    monkeypatch.setattr(compiler, "get_ptxas_version", lambda arch: usual.version)
    choose = _versions._other_ptxas.__wrapped__
    assert choose() == ("/12.9/ptxas", {"ptx_version": 88})
    with monkeypatch.context() as chosen:
        chosen.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/mine")
        assert choose() is None
    with monkeypatch.context() as chosen:
        chosen.setitem(vars(knobs.nvidia), "ptxas_blackwell", "/mine")
        assert choose() is None
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: Knobs.ptxas)
    assert choose() is None
    monkeypatch.delattr(compiler, "get_ptxas")
    assert choose() is None
