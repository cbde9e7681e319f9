"""Pairs of blocks of threads of the Hopper forward: when they are chosen, what they rely on."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.hopper_forms import forward_forms
from tests.unit.test_hopper_forms import BEFORE, check_compiled, prepared_for_h200

from keel import _versions, masks
from keel.kernels import hopper_forms, hopper_launch, hopper_places
from keel.kernels.hopper_launch import choose_form
from keel.meta import Scoring

PAIRED = """.param .align 64 .b8 hopper_fwd_kernel_param_14[128],
.param .align 64 .b8 hopper_fwd_kernel_param_21[128],
.reqntid 384
"""


def test_what_pairs_take_for_granted_is_looked_at(monkeypatch):
    monkeypatch.setattr(hopper_forms, "goes_on_after_products", lambda: True)

    def check(*places: int, ptx: str = PAIRED) -> None:
        check_compiled(
            *(f"@global_smem, i32 {place}" for place in places), ptx=ptx + BEFORE, paired=True
        )

    right = (0, 65536, 131072, 196608)
    check(*right)
    for wrong in ((0, 196608), (0, 131072, 65536, 196608), (0, 65536, 131072, 196616)):
        with pytest.raises(RuntimeError, match=r"queries, keys, values and barriers at"):
            check(*wrong)
    for number in (14, 21):
        with pytest.raises(RuntimeError, match=f"has no descriptor as parameter {number}: nothing"):
            check(*right, ptx=PAIRED.replace(f"param_{number}", "param_7"))
    for threads in ("512", "288"):  # Triton's own threads would not meet
        with pytest.raises(RuntimeError, match=f"has {threads} threads, not 384"):
            check(*right, ptx=PAIRED.replace("384", threads))
    with pytest.raises(RuntimeError, match="has no number of threads, not 384"):
        check(*right, ptx=PAIRED.replace(".reqntid", ".maxntid"))


@pytest.mark.parametrize("scarce", [True, False])
def test_pairs_of_full_heads_where_registers_are_scarce(monkeypatch, scarce):
    """With Triton 3.7: what it would keep on the stack, it makes anew, or has no need of."""
    monkeypatch.setattr(hopper_forms, "keeps_addresses", lambda: not scarce)

    def pair(dim: int, **options: bool) -> hopper_forms.Form:
        out_matches = not options.get("accumulate")
        return replace(choose_form(dim, dim, 64, out_matches=out_matches, **options), paired=True)

    assert pair(256, has_sink=True).seeks is scarce
    assert pair(256, accumulate=True).trails is scarce
    for other in (pair(256), pair(256, has_sink=True, want_max=True), pair(192, has_sink=True)):
        assert not other.seeks and not other.trails
    assert not replace(pair(256, has_sink=True), paired=False).seeks
    assert not replace(pair(256, accumulate=True), paired=False).trails


def test_news_has_room_for_all_that_may_be_on_their_way():
    """The one may be as many tiles ahead as there are stages, of a block each, and has told the
    other of one more."""
    for form in {x for x in forward_forms() if x.paired}:
        assert form.stages + 1 <= hopper_forms.NEWS
        numbers = [number for number, _ in hopper_places._counts(form)]
        assert len(set(numbers)) == len(numbers)
        assert hopper_forms.TOLD_AT + 4 * hopper_forms.NEWS <= hopper_forms.TOPS_AT


@pytest.mark.parametrize(
    ("heads", "kv_heads", "margin", "paired"),
    [
        (64, 8, 0, True),
        (6, 3, 0, True),
        (64, 64, 0, False),
        (6, 2, 0, False),  # three of each
        (64, 8, 1, False),  # beside other kernels
    ],
)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_even_groups_of_heads_go_by_twos(monkeypatch, heads, kv_heads, margin, paired, d):
    mask = masks.causal(8192)
    made = prepared_for_h200(
        monkeypatch, mask, d, Scoring(scale=1.0), heads, kv_heads, margin=margin
    )
    apart = prepared_for_h200(monkeypatch, mask, d, Scoring(scale=1.0), heads, kv_heads, margin=1)
    form, numbers = made.arguments["FORM"], made.arguments
    assert form.paired is paired and made.cluster == (2 if paired else 1)
    assert form.trails is (paired and d == 128)
    if paired:
        assert made.grid == (66,)
        for name in ("num_work", "section"):
            assert 2 * numbers[name] == apart.arguments[name], name
        assert all(numbers[name] == apart.arguments[name] for name in ("num_heads", "group"))
    else:
        assert made.grid == (132 - margin,)


def test_packed_heads_and_parts_do_not_go_by_twos(monkeypatch):
    monkeypatch.setattr(hopper_launch, "knows_clusters", lambda: True)
    assert hopper_launch.can_be_paired(choose_form(128, 128, 128, out_matches=True), 8)
    for options in ({"pack": 8}, {"cuts": True}):
        form = choose_form(128, 128, 128, out_matches=True, **options)
        assert not hopper_launch.can_be_paired(form, 8)
    for copies in (True, False):
        monkeypatch.setattr(hopper_launch, "copies_operands", lambda copies=copies: copies)
        for dims, paired in {(256, 128): not copies, (256, 256): True, (192, 128): True}.items():
            form = choose_form(*dims, 64, out_matches=True)
            assert hopper_launch.can_be_paired(form, 8) is paired, dims
    monkeypatch.setattr(hopper_launch, "knows_clusters", lambda: False)
    assert not hopper_launch.can_be_paired(choose_form(128, 128, 128, out_matches=True), 8)


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.0", True), ("3.9.1", True), ("3.10.0", False)]
)
def test_clusters_of_launchers_that_were_read(monkeypatch, version, known):
    monkeypatch.setattr("triton.__version__", version)
    assert _versions.knows_clusters.__wrapped__() is known
