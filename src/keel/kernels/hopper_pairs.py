"""Two blocks of threads of the Hopper forward that share keys and values (Gluon, sm_90).

Query heads of one key head see the same keys. So two neighbours on the GPU, a cluster, take the
same tile of two such heads. Each brings half of the columns of a block of keys, and TMA writes them
to the shared memory of both: half as much goes from the L2 to the SMs.

A stage may be written over when both are done with it: producers tell each other, stage by stage.
The first of the two draws work and tells the other what it has drawn. Nobody may reach for shared
memory of a block of threads that has not begun or that has ended: so both meet before they begin,
and what one sends, the other waits for. Arrivals there publish nothing that threads have written,
so none of them is a fence of the whole GPU.

Addresses in shared memory are those of `hopper_places`, the same in both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from keel.kernels import hopper_forms
from keel.kernels.hopper_common import phase_of, stage_of, wait_for
from keel.kernels.hopper_places import K_FULL, V_FREE, V_FULL, one_of

# fmt: off

K_SHARED = gl.constexpr(hopper_forms.K_SHARED_AT)
V_SHARED = gl.constexpr(hopper_forms.V_SHARED_AT)
NEWS = gl.constexpr(hopper_forms.NEWS)
NEWS_AT = gl.constexpr(hopper_forms.NEWS_AT)
TOLD = gl.constexpr(hopper_forms.TOLD_AT)
PANEL = gl.constexpr(hopper_forms.PANEL)
MULTICAST = gl.constexpr("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx"
                         "::bytes.multicast::cluster")


@gluon.jit
def meet_peer():
    """All threads of both, when barriers are set up."""
    gl.inline_asm_elementwise(
        """barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 $0, 0;""", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def idle():
    """Of warps that fill up a warpgroup, which Triton would add: they have to meet the peer too."""
    meet_peer()


@gluon.jit
def rank_in_pair():
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32,
                                     is_pure=False, pack=1)


@gluon.jit
def tell_done(ring, FIRST: gl.constexpr, stage, rank, form: gl.constexpr):
    """To the peer: this block of threads is done with a stage."""
    AT: gl.constexpr = form.PLACES_AT + 8 * FIRST
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane, there;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mapa.shared::cluster.u32 there, $1, $2;
        @first mbarrier.arrive.shared::cluster.b64 _, [there];
        mov.u32 $0, 0;
        }""", "=r,r,r,~{memory}", [ring.at + AT + stage * 8, rank ^ 1],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def share_keys(ring, key, head, count, rank, form: gl.constexpr):
    """This block's half of block number `count`, when both are done with what was there."""
    stage = stage_of(count, form)
    if count >= form.STAGES:
        wait_for(form.KEYS_FREE + stage, form.CONSUMERS)
        tell_done(ring, K_SHARED, stage, rank, form)
    mbarrier.expect(one_of(ring, K_FULL, stage), form.BN * form.D * 2)
    if count >= form.STAGES:
        mbarrier.wait(one_of(ring, K_SHARED, stage), phase_of(count, form) ^ 1)
    _share(form.KEYS_PARAMETER, form.D, form.KEYS_AT, K_FULL, ring, key, head, stage, rank, form)


@gluon.jit
def share_values(ring, key, head, count, rank, form: gl.constexpr):
    """The same of values."""
    stage = stage_of(count, form)
    if count >= form.STAGES:
        wait_for(V_FREE + stage, form.CONSUMERS)
        tell_done(ring, V_SHARED, stage, rank, form)
    mbarrier.expect(one_of(ring, V_FULL, stage), form.BN * form.DV * 2)
    if count >= form.STAGES:
        mbarrier.wait(one_of(ring, V_SHARED, stage), phase_of(count, form) ^ 1)
    _share(form.VALUES_PARAMETER, form.DV, form.VALUES_AT, V_FULL, ring, key, head, stage,
           rank ^ 1, form)


@gluon.jit
def _share(PARAMETER: gl.constexpr, COLUMNS: gl.constexpr, AT: gl.constexpr, CAME: gl.constexpr,
           ring, key, head, stage, first, form: gl.constexpr):
    """Every other 64 columns of a block, from number `first` on, to both: where they are an odd
    number, the one brings more of the keys and the other of the values."""
    PANELS: gl.constexpr = COLUMNS // PANEL
    BELL: gl.constexpr = form.PLACES_AT + 8 * CAME
    for pair in gl.static_range((PANELS + 1) // 2):
        gl.inline_asm_elementwise(
            f"""{{
            .reg .pred mine;
            .reg .b32 number, column, place;
            .reg .b64 map;
            .reg .b16 both;
            mov.b32 number, hopper_fwd_kernel_param_{PARAMETER};
            cvt.u64.u32 map, number;
            cvta.param.u64 map, map;
            mov.u32 number, %laneid;
            setp.eq.u32 mine, number, 0;
            add.u32 number, $3, {2 * pair};
            setp.lt.and.u32 mine, number, {PANELS}, mine;
            mul.lo.u32 column, number, {PANEL};
            mad.lo.u32 place, number, {form.BN * PANEL * 2}, $1;
            mov.b16 both, 3;
            @mine {MULTICAST} [place], [map, {{column, $4, $5}}], [$2], both;
            mov.u32 $0, 0;
            }}""", "=r,r,r,r,r,r,~{memory}",
            [ring.at + AT + stage * (form.BN * COLUMNS * 2), ring.at + BELL + stage * 8, first,
             head, key],
            dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tell_peer(ring, turn, number, rank, form: gl.constexpr):
    """A number of the first block of threads, told by it to the second."""
    slot = turn & (NEWS - 1)
    bell = ring.at + (form.PLACES_AT + 8 * NEWS_AT) + slot * 8
    place = ring.at + (form.PLACES_AT + TOLD) + slot * 4
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first, tells, hears, done;
        .reg .b32 lane, there, bell;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        setp.eq.and.u32 tells, $4, 0, first;
        setp.ne.and.u32 hears, $4, 0, first;
        mapa.shared::cluster.u32 there, $1, 1;
        mapa.shared::cluster.u32 bell, $2, 1;
        mov.u32 $0, $3;
        @tells st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], $3, [bell];
        @hears mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], 4;
        setp.eq.u32 tells, $4, 0;
        @tells bra.uni known;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$2], $5;
        @!done bra.uni again;
        ld.shared.b32 $0, [$1];
        known:
        }""", "=&r,r,r,r,r,r,~{memory}", [place, bell, number, rank, (turn // NEWS) & 1],
        dtype=gl.int32, is_pure=False, pack=1)


# fmt: on
