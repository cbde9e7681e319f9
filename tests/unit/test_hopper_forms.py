"""What the Hopper forward is compiled for, and what it refuses to be."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from keel.kernels.hopper_launch import choose_form


def test_consumers_decide_the_rows_of_a_tile():
    for consumers, rows in ((2, 128), (3, 192)):
        form = choose_form(64, 40, 128, out_matches=True, want_max=True, consumers=consumers)
        assert (form.rows, form.consumers) == (rows, consumers)
        assert form.tree == form.late_bounds == (consumers == 3)  # it has few registers
    assert choose_form(128, 128, 128, out_matches=True).rows == 128
    assert choose_form(64, 64, 128, out_matches=True, tree=True).rows == 128


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
