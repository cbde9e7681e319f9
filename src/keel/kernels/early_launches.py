"""Launches that begin before the one before them is done (Gluon, sm_90).

A launch usually begins when the one before it has ended: SMs that have nothing left to do wait for
the last block of threads, and then for a new launch. One that is `early` (`launch.Prepared`) begins
as soon as all blocks of threads of the one before have said that it may, and waits for it by
itself, where it needs what that one wrote. A backward is such a chain, on one stream:

    row terms -> dk, dv (and dq) -> sums        or        row terms -> dk, dv -> dq -> sums

Row terms let the next one begin at once; they are no early launch, so all that came before the
backward is done. dk and dv wait for them before anything else, and only then let the next one
begin: whatever runs after that finds row terms in memory. So dq, which needs nothing of dk and dv,
waits for these at its very end, for the sake of what comes behind it, and makes use of all SMs
meanwhile. Sums wait at once.

Blocks of threads that stay, for a margin of SMs, let nobody begin early: the next launch would run
on the SMs that are left to others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# fmt: off


@gluon.jit
def wait_for_launch_before():
    """Until all of it is done, and what it wrote is seen; no time in a launch that is not early."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_launch_begin():
    """If it is early: when all blocks of threads of this one have said so."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}",
                              [], dtype=gl.int32, is_pure=False, pack=1)


# fmt: on
