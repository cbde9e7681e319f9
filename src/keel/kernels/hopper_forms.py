"""What the Hopper kernels are compiled for, and what follows from it for their registers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl

from keel import tile_records
from keel._versions import (
    copies_operands,
    goes_on_after_products,
    holds_wide_tiles,
    keeps_addresses,
    wastes_registers,
)

Q_FULL_AT, Q_EMPTY_AT, FIELDS_FULL_AT, FIELDS_EMPTY_AT, K_FULL_AT, V_FULL_AT = 0, 2, 4, 6, 8, 12
"""Where barriers are in PLACES of `hopper_places`, each of 8 bytes; up to four stages."""
K_SHARED_AT, V_SHARED_AT, NEWS_AT = 16, 20, 24
"""Those of `hopper_pairs`: stages that the peer is done with, and its news."""
NEWS = 8
"""Of these, so many may be on their way: more than there are stages."""
TOLD_AT = 8 * (NEWS_AT + NEWS)
"""Where news is in PLACES, in bytes."""
DESCRIPTOR_PARAMETERS = 7
"""Of PTX, for one argument of a kernel: the descriptor, three sizes and three strides."""
TOPS_AT = 512
"""Where highest scores of rows are in it, in bytes."""
SPOOL_AT = 2048
"""Where results are on their way out, if they are there at all."""
SPOOLED = 2048
"""Bytes of 16 rows of 64 columns."""
PANEL = 64
"""Columns of a swizzle of 128 bytes."""


class Constants:
    """A dataclass of these in one constexpr argument: device code sees its fields as capitals."""

    def __getattr__(self, name: str) -> Any:
        if not name.isupper():
            raise AttributeError(name)
        return gl.constexpr(getattr(self, name.lower()))

    def __str__(self) -> str:
        """Fields and properties: Triton looks for compiled kernels by this, and must not find
        those of a version in which a property had another value."""
        names = sorted(n for n, x in inspect.getmembers(type(self)) if isinstance(x, property))
        return f"{self!r} {[(name, getattr(self, name)) for name in names]}"


@dataclass(frozen=True)
class Form(Constants):
    """What a variant of the forward is compiled for."""

    d: int
    """Columns of queries and keys in shared memory: 64, 128, 192 or 256."""
    dv: int
    """Of values: a power of two."""
    bn: int
    """Keys of a block."""
    stages: int = 2
    """Blocks of keys and values in shared memory."""
    q_buffers: int = 2
    """With two, the next queries come while a tile is worked on."""
    staged: bool = True
    """Results leave through shared memory, in the place of their queries, by TMA."""
    spools: bool = False
    """They have a place of their own there, for 64 columns of each warp at a time."""
    columns: int = 0
    """Of out, where fewer than dv."""
    depth: int = 0
    """Columns that scores are made of, where fewer than d: the rest is zeros."""
    consumers: int = 2
    """Warpgroups of 64 rows: 2 or, for head dim 64, 3."""
    halves: bool = False
    """Probabilities of a block go to the tensor cores in two parts."""
    skips: bool = False
    """Of partial blocks, consumers compute the half that they need, or nothing."""
    turns: bool = False
    """Consumers issue their products in turns, so that each has its exponentials while others have
    the tensor cores. For two stages: the barriers of a third serve for this."""
    has_sink: bool = False
    has_softcap: bool = False
    want_max: bool = False
    accumulate: bool = False
    cuts: bool = False
    """Tiles may be parts of a tile, cut along its keys, that meet when they are done."""
    pack: int = 1
    """Query heads of one key head in a tile, a power of two: see `hopper_rows`."""
    paced: bool = False
    """Blocks of threads begin their tiles together: see `pace`."""
    paired: bool = False
    """Two blocks of threads share the keys and values of two query heads: see `hopper_pairs`."""

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.consumers * tile_records.PART

    @property
    def one_code(self) -> bool:
        """Both consumers run the same code, eight warps of it: see `hopper_places`."""
        plain = self.consumers == 2 and self.pack == 1 and not self.cuts
        return plain and self.q_buffers == 2 and goes_on_after_products()

    @property
    def codes(self) -> int:
        """Consumers that have code of their own."""
        return 1 if self.one_code else self.consumers

    @property
    def own_rows(self) -> int:
        """Of a tile, those of one code."""
        return self.rows // self.codes

    @property
    def warps(self) -> int:
        """Of one code."""
        return self.own_rows // 16

    @property
    def sent_rows(self) -> int:
        """Of results, those that leave at once."""
        return 16 if self.one_code or self.spools else self.own_rows

    @property
    def panels(self) -> int:
        """Arrays that hold queries, or keys: 192 columns, which are no power of two, are three."""
        return 1 if self.d & (self.d - 1) == 0 else self.d // PANEL

    @property
    def spool_of_warp(self) -> int:
        """Bytes: room for 64 columns while others leave, where there is so much."""
        return SPOOLED if self.panels > 1 and self.bn == 128 else 2 * SPOOLED

    @property
    def arrivals(self) -> int:
        """Of consumers, at a barrier that the producer waits at."""
        return self.warps * self.codes

    @property
    def keys_free(self) -> int:
        """First named barrier of the stages of keys. The named barriers of the forward are

        - Triton's own, 0 and 1 where consumers run one code, and few more elsewhere,
        - `meeting` and the next one,
        - from here on one for each stage of keys, and from 12 on one for each stage of values,
        - of turns, which go with two stages, 11, 14 and 15.
        """
        return 8 if self.stages == 4 else 9

    @property
    def meeting(self) -> int:
        """First of two named barriers, at which the warps of each consumer of one code meet."""
        return self.keys_free - 2

    @property
    def places(self) -> int:
        """Size of PLACES, each of 8 bytes: more than anything else is large that is not there for
        queries, keys or values."""
        spool = self.consumers * 4 * self.spool_of_warp if self.spools else 0
        return (SPOOL_AT + spool) // 8

    @property
    def queries_at(self) -> int:
        """Bytes of shared memory before queries: Triton lays larger arrays down first."""
        return self._larger_than(2 * self.q_buffers * self.rows * self.d)

    @property
    def keys_at(self) -> int:
        """The same of keys; behind queries, if those are as large, and"""
        queries, keys, _ = self._sizes
        return self._larger_than(keys) + keys * (queries == keys)

    @property
    def values_at(self) -> int:
        """of values."""
        queries, keys, values = self._sizes
        return self._larger_than(values) + values * ((queries == values) + (keys == values))

    @property
    def places_at(self) -> int:
        """Bytes of shared memory before PLACES."""
        return self._larger_than(8 * self.places)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of queries, keys and values."""
        keys, values = (2 * self.stages * self.bn * x for x in (self.d, self.dv))
        return 2 * self.q_buffers * self.rows * self.d, keys, values

    def _larger_than(self, size: int) -> int:
        """Bytes of all arrays of shared memory that are larger."""
        return sum(x for x in (*self._sizes, 8 * self.places) if x > size)

    @property
    def keys_parameter(self) -> int:
        """Number of the descriptor of keys among parameters of PTX: behind those of queries and, if
        TMA writes it, of out."""
        return DESCRIPTOR_PARAMETERS * (2 if self.staged or self.spools else 1)

    @property
    def values_parameter(self) -> int:
        """The same of values."""
        return self.keys_parameter + DESCRIPTOR_PARAMETERS

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return self.rows // self.pack

    @property
    def pack_bits(self) -> int:
        return self.pack.bit_length() - 1

    @property
    def bits(self) -> bool:
        """Masks by bits, where there are registers for them: see `hide`."""
        return self.consumers == 2 and not self.cuts and (self.d + self.dv <= 256 or self.bn == 128)

    @property
    def least(self) -> bool:
        """There are few registers: masks and maxima by what takes the fewest of them (see `hide`,
        `row_max`)."""
        if self.consumers == 3:
            return True
        capped, added = self.has_softcap, self.accumulate
        # the one or the other is enough to spill with Triton 3.8, both are with 3.9
        return self._is_full and not self.cuts and (capped or (added and wastes_registers()))

    @property
    def _is_full(self) -> bool:
        """Heads fill blocks of 256 columns."""
        return self.d > 128 and (self.dv, self.columns) == (256, 0)

    @property
    def rereads(self) -> bool:
        """Bounds of rows are read when they are needed: there are few registers."""
        parts = self.cuts and self.q_buffers == 2 and self.bn == 128
        capped = self.q_buffers == 1 and self.has_softcap
        # beside each row's highest score, which lazy forms keep by itself
        full = self._is_full and self.lazy and self.want_max and not keeps_addresses()
        return self.least or capped or full or (parts and wastes_registers())

    @property
    def carries(self) -> bool:
        """A tile is put away when the next one has begun. With one buffer of queries that takes
        registers, and is faster only where heads fill their blocks of 256 columns."""
        if self.q_buffers == 2:
            return True
        plain = not (self.cuts or self.accumulate or self.has_softcap)
        return self._is_full and plain and holds_wide_tiles()

    @property
    def at_once(self) -> bool:
        """Results are written as a whole, not by 64 columns."""
        return self.staged or (self.q_buffers == 1 and self.carries and not self.spools)

    @property
    def caps_top(self) -> bool:
        """The highest score behind softcap is made from the highest before it: one maximum of a
        block for two, but a longer way to it, which pays where heads are wide."""
        return self.has_softcap and self.want_max and self.q_buffers == 1

    @property
    def seeks(self) -> bool:
        """The address of shared memory is made anew for each wait: no register is left for it."""
        fullest = self.q_buffers == 1 and self.has_softcap and self.want_max and self.cuts
        sinks = self.paired and self._is_full and self.has_sink and not self.want_max
        return (fullest or sinks) and not keeps_addresses()

    @property
    def caps_anew(self) -> bool:
        """Numbers of a softcap are constants, or made anew for each block: Triton 3.9 has no
        registers to keep them in."""
        return self.least and self.caps_top and copies_operands()

    @property
    def late(self) -> bool:
        """Nothing is read ahead of a run of blocks: there are no registers for it."""
        return self.q_buffers == 1

    @property
    def unhurried(self) -> bool:
        """The next tile is looked at when products are made, and fields of one are given back when
        it is put away: earlier, loops of Triton 3.6 spill. Heads that fill their blocks spill by it
        with 3.7."""
        wide = self.d > 128 and self.dv == 256
        return wide and self.has_softcap and self.want_max and self.cuts

    @property
    def producer_registers(self) -> int:
        """Of the 512 of four threads; the second consumer has 240, the first what is left. Two that
        run the same code have 240 if the producer has 24."""
        if self.one_code:
            return 24
        # elsewhere, what leaves nothing on the stack
        if self.caps_anew:
            return 24
        wide_parts = self.cuts and self.dv > 64
        if self.carries:
            packed = self.pack > 1 and self.bn == 128
            if wide_parts and (copies_operands() or (packed and wastes_registers())):
                return 24
            return 40 if self.cuts and self.has_softcap and not keeps_addresses() else 32
        more = self.has_softcap and copies_operands() and (self.want_max or self.dv < 256)
        if wide_parts and not more:
            return 24
        return 32 if self.has_softcap or (wastes_registers() and not self.cuts) else 24

    @property
    def by_factors(self) -> bool:
        """The producer multiplies by what the host gives it, in place of divisions, and begins a
        tile sooner. Loops of wide heads are 5 to 7 % slower with it; forms of parts of tiles, of
        packed heads, and of three consumers that add would keep a number on the stack."""
        adds = self.consumers == 3 and self.accumulate
        return self.q_buffers == 2 and self.pack == 1 and not (self.cuts or adds)

    @property
    def trails(self) -> bool:
        """Values are brought a block behind their keys: stages of keys are free earlier. Timed for
        pairs with blocks of 128 keys, 0 to 2 % faster; with others it was not, or slower. With
        Triton 3.7, full heads that are added to something keep a number on the stack without."""
        timed = (self.d, self.dv, self.bn) == (128, 128, 128)
        adds = self._is_full and self.accumulate and not keeps_addresses()
        return self.paired and (timed or adds)

    @property
    def lazy(self) -> bool:
        """Sums of values are scaled anew where a highest score has risen far enough, not in each
        block: a seventh of its instructions at head dim 128, a third at 256. With 64 columns that
        is no faster; with a softcap, packed heads and parts of tiles it was not tried."""
        whole = self.pack == 1 and not self.cuts
        return self.dv >= 128 and whole and not self.has_softcap

    @property
    def tops(self) -> bool:
        """The producer raises max logits: it waits for each tile to be put away, if there are two
        buffers."""
        return self.want_max and self.q_buffers == 2


@dataclass(frozen=True)
class BackwardForm(Constants):
    """What a variant of the backward is compiled for."""

    d: int
    """Columns of blocks, 64 or 128; heads may have fewer."""
    bm: int
    """Rows of a block: 64 · 128 / d, so that each consumer makes 64 x 64 of dq."""
    dk_columns: int
    """Of heads."""
    dv_columns: int
    stages: int = 2
    """Blocks of rows in shared memory."""
    staged: bool = True
    """dk and dv leave through shared memory, in the place of their keys and values, by TMA."""
    persistent: bool = False
    """Blocks of threads stay and take one tile after the other, on fewer SMs than there are."""
    with_dq: bool = True
    """Else `hopper_bwd_dq` makes it, in a fixed order."""
    together: bool = False
    """Query heads that share keys take turns, so that tiles stay together: see `key_order`. Blocks
    of threads that stay and make dq have such records too, with turns or without."""
    has_softcap: bool = False
    has_bias: bool = False
    has_alibi: bool = False
    has_offset: bool = False
    """Rows of ALiBi stand at keys of their own."""

    @property
    def has_terms(self) -> bool:
        """Something is added to scores."""
        return self.has_bias or self.has_alibi

    @property
    def plain(self) -> bool:
        """The form of most masks and heads, where nothing else wants registers."""
        added = self.has_terms or self.has_softcap
        return self.with_dq and not (self.together or self.persistent or added)

    @property
    def reads_ahead(self) -> bool:
        """Runs of blocks are read while the blocks before are worked on, and the first bounds of
        keys are not touched before they are read: else the instructions of the loops come in an
        order that takes 3 to 6 % longer."""
        return self.plain and self.d == 128

    @property
    def crowded(self) -> bool:
        """Loops spill with Triton 3.9, but where instructions are ordered for few registers."""
        return self.has_bias and self.has_softcap and self.d == 128

    @property
    def producer_begins(self) -> bool:
        """The producer sets up barriers. Else the first consumer, which does, keeps the number of
        its thread from there: on the stack, with Triton 3.6, and loads it in the loops."""
        return self.with_dq and not (self.staged or self.persistent)

    @property
    def producer_registers(self) -> int:
        """Of four threads, one of each; the second consumer has its own, the first what is left."""
        return 32 if self.has_offset and self.d == 64 else 24

    @property
    def second_registers(self) -> int:
        """Of the second consumer: with Triton 3.9 the first has one number less than registers."""
        full = self.has_bias and self.has_softcap and self.d == 64
        return 248 if full and copies_operands() else 240

    @property
    def asks_anew(self) -> bool:
        """The number of a head is made anew for each: Triton 3.8 and 3.9 have no register left for
        the last one's."""
        full = self.has_alibi and self.persistent and self.has_softcap and self.d == 64
        return full and (copies_operands() or wastes_registers())

    @property
    def dv(self) -> int:
        """Columns of blocks of values."""
        return self.d

    @property
    def parts(self) -> int:
        """Of 64 keys, in a tile."""
        return 2


@dataclass(frozen=True)
class WideForm(Constants):
    """What a variant of dk and dv for wide heads is compiled for."""

    d: int
    """Columns of blocks of queries and keys, 64 to 256; heads may have fewer."""
    dv: int
    """Of values and dout."""
    dk_columns: int
    """Of heads."""
    dv_columns: int
    stages: int = 2
    """Blocks of rows in shared memory, and of weights."""
    persistent: bool = False
    has_softcap: bool = False
    has_bias: bool = False
    has_alibi: bool = False
    has_offset: bool = False
    """Rows of ALiBi stand at keys of their own."""

    @property
    def has_terms(self) -> bool:
        """Something is added to scores."""
        return self.has_bias or self.has_alibi

    @property
    def reads_ahead(self) -> bool:
        return False

    @property
    def crowded(self) -> bool:
        """Loops spill with Triton 3.9, but where instructions are ordered for few registers."""
        return False

    @property
    def producer_begins(self) -> bool:
        return False

    @property
    def bm(self) -> int:
        """Rows of a block."""
        return tile_records.PART

    @property
    def parts(self) -> int:
        """Of 64 keys, in a tile: all are both consumers'."""
        return 1

    @property
    def together(self) -> bool:
        """Heads come one after the other: dq is apart."""
        return False

    @property
    def short(self) -> bool:
        """The last quarter of queries and keys is zeros, and left out of products."""
        return self.d == 256 and self.dk_columns <= 192

    @property
    def staged(self) -> bool:
        """dk and dv are written as they lie in registers."""
        return False

    @property
    def with_dq(self) -> bool:
        return False


@dataclass(frozen=True)
class QueryForm(Constants):
    """What a variant of dq in a fixed order is compiled for."""

    d: int
    """Columns of blocks of queries and keys, 64 to 256; heads may have fewer."""
    dv: int
    """Of values and dout."""
    bn: int
    """Keys of a block."""
    columns: int
    """Of heads."""
    stages: int = 2
    """Blocks of keys in shared memory, and"""
    v_stages: int = 2
    """of values, which are done with earlier."""
    staged: bool = True
    """dq leaves through shared memory, in the place of its queries, by TMA."""
    persistent: bool = False
    has_softcap: bool = False
    has_bias: bool = False
    has_alibi: bool = False
    has_offset: bool = False
    """Rows of ALiBi stand at keys of their own."""
    want_dbias: bool = False

    @property
    def has_terms(self) -> bool:
        """Something is added to scores."""
        return self.has_bias or self.has_alibi

    @property
    def asks_anew(self) -> bool:
        """How many blocks of threads there are is asked when it is needed: Triton 3.8 and 3.9 have
        no register to keep it in."""
        return copies_operands() or wastes_registers()

    @property
    def short(self) -> bool:
        """The last quarter of queries and keys is zeros, and left out of products."""
        return self.d == 256 and self.columns <= 192
