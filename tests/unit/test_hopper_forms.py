"""What the Hopper forward is compiled for, and what it refuses to be."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from keel import masks
from keel.kernels.hopper_launch import choose_form
from keel.kernels.hopper_tiles import three_are_faster
from keel.tile_records import best_records


def test_consumers_decide_the_rows_of_a_tile():
    for consumers, rows in ((2, 128), (3, 192)):
        form = choose_form(64, 40, 128, out_matches=True, want_max=True, consumers=consumers)
        assert (form.rows, form.consumers) == (rows, consumers)
    assert choose_form(128, 128, 128, out_matches=True).rows == 128


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
