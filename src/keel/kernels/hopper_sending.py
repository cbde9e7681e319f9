"""Results of the Hopper forward on their way out, where consumers run the same code: each warp
sends its own 16 rows by TMA, by way of where their queries were, and waits for no other one."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from keel.kernels import hopper_forms
from keel.kernels.hopper_common import HALF

# fmt: off

SPOOLED = gl.constexpr(hopper_forms.SPOOLED)
OPERANDS = gl.constexpr(",".join(["=r"] * 32 + ["r"] * 48) + ",~{memory}")
"""Of 32 numbers of a thread: as many answers that mean nothing, as many times the same address, and
the numbers, two in a register."""


@gluon.constexpr_function
def stores(at):
    """Of 64 columns of a warp's 16 rows, a quarter of them to each of four addresses."""
    lines = (
        f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{place}+{at}], "
        f"{{${64 + n}, ${65 + n}, ${66 + n}, ${67 + n}}};"
        for n, place in zip(range(0, 16, 4), ("first", "second", "third", "fourth"), strict=True)
    )
    return " ".join(lines)


@gluon.jit
def stage_rows(ring, x, buffer, form: gl.constexpr, CHUNK: gl.constexpr):
    """64 columns of results to where the queries of their rows were, in the order of 128 bytes that
    TMA expects. Four warps have waited for products of these queries: not before all of them have
    is any of the queries written over."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[form.WARPS, 1], instr_shape=[16, HALF, 16])
    x = gl.convert_layout(x, layout)
    AT: gl.constexpr = CHUNK * form.ROWS * 128
    MEETING: gl.constexpr = form.MEETING
    STORE: gl.constexpr = stores(AT)
    MEET: gl.constexpr = "bar.sync number, 128;" if CHUNK == 0 else ""
    place = gl.full(x.shape, ring.at + buffer * (form.ROWS * form.D * 2), gl.int32, layout)
    gl.inline_asm_elementwise(
        f"""{{
        .reg .b32 lane, warp, number, first, second, third, fourth;
        mov.u32 warp, %tid.x;
        shr.u32 number, warp, 7;
        add.u32 number, number, {MEETING};
        shr.u32 warp, warp, 5;
        mov.u32 lane, %laneid;
        and.b32 second, lane, 15;
        shl.b32 second, second, 7;
        mad.lo.u32 second, warp, 2048, second;
        add.u32 second, second, $32;
        shr.u32 first, lane, 4;
        and.b32 lane, lane, 7;
        xor.b32 lane, lane, first;
        shl.b32 lane, lane, 4;
        add.u32 first, second, lane;
        xor.b32 third, lane, 64;
        xor.b32 fourth, lane, 96;
        xor.b32 lane, lane, 32;
        add.u32 fourth, fourth, second;
        add.u32 third, third, second;
        add.u32 second, second, lane;
        {MEET}
        {STORE}
        mov.u32 $0, 0;
        }}""", OPERANDS, [place, x], dtype=gl.int32, is_pure=False, pack=32)


@gluon.jit
def send_rows(ring, row0, row_end, head, buffer, form: gl.constexpr):
    """A warp's 16 rows, if the tile has all of them; others are `unsent`.

    The descriptor is the kernel's first argument: Gluon does not tell where it lies either.
    """
    SEND: gl.constexpr = "@mine cp.async.bulk.tensor.3d.global.shared::cta.bulk_group"
    MORE: gl.constexpr = (
        f"{SEND} [map, {{column, $3, row}}], [second];" if form.DV == 2 * HALF else "")
    gl.inline_asm_elementwise(
        f"""{{
        .reg .pred mine;
        .reg .b32 lane, warp, row, end, column, first, second;
        .reg .b64 map;
        mov.b32 first, hopper_fwd_kernel_param_0;
        cvt.u64.u32 map, first;
        cvta.param.u64 map, map;
        mov.u32 warp, %tid.x;
        shr.u32 warp, warp, 5;
        mov.u32 lane, %laneid;
        mad.lo.u32 row, warp, 16, $1;
        add.u32 end, row, 16;
        setp.eq.u32 mine, lane, 0;
        setp.le.and.s32 mine, end, $2, mine;
        mad.lo.u32 first, warp, 2048, $4;
        add.u32 second, first, {form.ROWS * 128};
        fence.proxy.async.shared::cta;
        bar.warp.sync 0xffffffff;
        mov.u32 column, 0;
        {SEND} [map, {{column, $3, row}}], [first];
        mov.u32 column, 64;
        {MORE}
        cp.async.bulk.commit_group;
        mov.u32 $0, 0;
        }}""", "=r,r,r,r,r,~{memory}",
        [row0, row_end, head, ring.at + buffer * (form.ROWS * form.D * 2)],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def spool_rows(ring, x, form: gl.constexpr, code: gl.constexpr, COLUMN: gl.constexpr):
    """64 columns of a warp's 16 rows to a place of their own, when what was there has left: the
    columns before the last ones or, of the first, all those of the tile before."""
    AT: gl.constexpr = place_of(form, code, COLUMN)
    STORE: gl.constexpr = stores(AT)
    SENT: gl.constexpr = 1 if COLUMN > 0 and form.SPOOL_OF_WARP > SPOOLED else 0
    # not from %tid.x: where that is read, ptxas takes loops to go apart, and operands of products
    # to be different in each thread
    warp = gl.arange(0, form.OWN_ROWS, gl.SliceLayout(1, x.type.layout)) >> 4
    place = gl.full(x.shape, ring.at, gl.int32, x.type.layout)
    place += (warp * form.SPOOL_OF_WARP)[:, None]
    gl.inline_asm_elementwise(
        f"""{{
        .reg .b32 lane, first, second, third, fourth;
        mov.u32 lane, %laneid;
        and.b32 first, lane, 15;
        shl.b32 first, first, 7;
        shr.u32 second, lane, 4;
        and.b32 lane, lane, 7;
        xor.b32 lane, lane, second;
        shl.b32 lane, lane, 4;
        or.b32 first, first, lane;
        add.u32 first, first, $32;
        xor.b32 second, first, 32;
        xor.b32 third, first, 64;
        xor.b32 fourth, first, 96;
        cp.async.bulk.wait_group.read {SENT};
        bar.warp.sync 0xffffffff;
        {STORE}
        mov.u32 $0, 0;
        }}""", OPERANDS, [place, x], dtype=gl.int32, is_pure=False, pack=32)


@gluon.jit
def send_spooled(ring, row0, row_end, head, form: gl.constexpr, code: gl.constexpr,
                 COLUMN: gl.constexpr):
    """What `spool_rows` has left, if the tile has all 16 rows; others are `unsent`."""
    AT: gl.constexpr = place_of(form, code, COLUMN)
    SEND: gl.constexpr = "@mine cp.async.bulk.tensor.3d.global.shared::cta.bulk_group"
    thread = gl.arange(0, 2 * form.OWN_ROWS, gl.BlockedLayout([1], [32], [form.WARPS], [0]))
    warp = thread >> 5
    gl.inline_asm_elementwise(
        f"""{{
        .reg .pred mine;
        .reg .b32 lane, end, column, first;
        .reg .b64 map;
        mov.b32 first, hopper_fwd_kernel_param_0;
        cvt.u64.u32 map, first;
        cvta.param.u64 map, map;
        add.u32 end, $1, 16;
        mov.u32 lane, %laneid;
        setp.eq.u32 mine, lane, 0;
        setp.le.and.s32 mine, end, $2, mine;
        mov.u32 column, {COLUMN};
        add.u32 first, $4, {AT};
        fence.proxy.async.shared::cta;
        bar.warp.sync 0xffffffff;
        {SEND} [map, {{column, $3, $1}}], [first];
        cp.async.bulk.commit_group;
        mov.u32 $0, 0;
        }}""", "=r,r,r,r,r,~{memory}",
        [row0 + code * form.OWN_ROWS + warp * 16, row_end + warp * 0, head + warp * 0,
         ring.at + warp * form.SPOOL_OF_WARP],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def place_of(form, code, column):
    """Of columns that are spooled, those of a consumer's first warp; two places take turns."""
    in_turn = column // 64 * hopper_forms.SPOOLED % form.spool_of_warp
    return form.places_at + hopper_forms.SPOOL_AT + 4 * code * form.spool_of_warp + in_turn


@gluon.jit
def unsent(rows, row0, row_end):
    """Rows of a tile that `send_rows` leaves: of a warp that has not 16 of them."""
    return (rows >= row0 + ((row_end - row0) & ~15)) & (rows < row_end)


@gluon.jit
def wait_until_sent(form: gl.constexpr):
    """Until results have left shared memory; told to those threads that sent them."""
    if form.ONE_CODE:
        gl.inline_asm_elementwise("cp.async.bulk.wait_group.read 0; mov.u32 $0, 0;",
                                  "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        tma.store_wait(0)


# fmt: on
