"""Blocked attention in torch: any device, fp64 capable, deterministic, never a tq x tk matrix.

Walks the same tile plan as the GPU kernels, all heads at once. Scores live as
(hk, g, rows, cols) where g = hq / hk query heads share a key head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from keel.masks import AttnMask
from keel.meta import Scoring
from keel.tiling import TilePlan, plan_tiles

BLOCK_M, BLOCK_N = 256, 256
MAX_COLUMNS = 1024
"""Full runs are worked off in pieces of this many keys, to bound memory."""


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    *,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out in the accumulation dtype, lse, max_logits)."""
    walk = _Walk(q, k, v, mask, scoring, block_m, block_n)
    tq, hq, dv = q.shape[0], q.shape[1], v.shape[2]
    out = torch.zeros(tq, hq, dv, dtype=walk.dtype, device=q.device)
    lse = torch.full((tq, hq), -torch.inf, dtype=walk.dtype, device=q.device)
    max_logits = torch.full((hq,), -torch.inf, dtype=walk.dtype, device=q.device)
    for rows, q_tile, blocks in walk.tiles():
        top = q_tile.new_full((*q_tile.shape[:3], 1), -torch.inf)
        total = torch.zeros_like(top)
        acc = q_tile.new_zeros((*q_tile.shape[:3], dv))
        for cols, seen in blocks:
            raw, logits, _ = walk.logits(q_tile, rows, cols, seen)
            max_logits = torch.maximum(max_logits, raw.amax((2, 3)).flatten())
            new_top = torch.maximum(top, logits.amax(3, keepdim=True))
            shift = torch.where(new_top == -torch.inf, 0.0, new_top)
            weight = torch.exp(logits - shift)
            decay = torch.exp(top - shift)
            total = total * decay + weight.sum(3, keepdim=True)
            acc = acc * decay + weight @ walk.v_tile(cols)
            top = new_top
        if scoring.sink is not None:
            sink = scoring.sink.to(walk.dtype).view(walk.hk, walk.g, 1, 1)
            new_top = torch.maximum(top, sink)
            shift = torch.where(new_top == -torch.inf, 0.0, new_top)
            decay = torch.exp(top - shift)
            total, acc, top = total * decay + torch.exp(sink - shift), acc * decay, new_top
        empty = total == 0
        out[rows] = walk.from_heads(acc / torch.where(empty, 1.0, total))
        tile_lse = torch.where(empty, -torch.inf, top + torch.log(torch.where(empty, 1.0, total)))
        lse[rows] = walk.from_heads(tile_lse)[..., 0]
    return out, lse, max_logits


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    *,
    want_dbias: bool = False,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv, dbias) in the working dtype; delta (tq, hq) = rowsum(dout * out) - dlse."""
    walk = _Walk(q, k, v, mask, scoring, block_m, block_n)
    dq, dk, dv = (torch.zeros(x.shape, dtype=walk.dtype, device=x.device) for x in (q, k, v))
    dbias = None
    if want_dbias:
        assert scoring.bias is not None
        dbias = torch.zeros(scoring.bias.shape, dtype=walk.dtype, device=q.device)
    for rows, q_tile, blocks in walk.tiles():
        dout_tile = walk.to_heads(dout[rows])
        tile_lse = walk.to_heads(lse[rows][..., None].to(walk.dtype))
        tile_lse = torch.where(tile_lse == -torch.inf, torch.inf, tile_lse)  # empty rows: p = 0
        tile_delta = walk.to_heads(delta[rows][..., None].to(walk.dtype))
        dq_tile = torch.zeros_like(q_tile)
        for cols, seen in blocks:
            _, logits, slope = walk.logits(q_tile, rows, cols, seen)
            prob = torch.exp(logits - tile_lse)
            dprob = dout_tile @ walk.v_tile(cols).mT
            dlogits = prob * (dprob - tile_delta)
            if slope is not None:
                dlogits = dlogits * slope
            if seen is not None:  # a masked NaN or inf must not leak through 0 * NaN
                dlogits = torch.where(seen, dlogits, 0.0)
            if dbias is not None:
                _add_reduced(dbias, dlogits.flatten(0, 1), rows, cols)
            dlogits = dlogits * scoring.scale
            dq_tile += dlogits @ walk.k_tile(cols)
            dk[cols] += (dlogits.flatten(1, 2).mT @ q_tile.flatten(1, 2)).transpose(0, 1)
            dv[cols] += (prob.flatten(1, 2).mT @ dout_tile.flatten(1, 2)).transpose(0, 1)
        dq[rows] = walk.from_heads(dq_tile)
    return dq, dk, dv, dbias


def max_logits(
    q: torch.Tensor, k: torch.Tensor, mask: AttnMask, scale: float, *, out: torch.Tensor
) -> None:
    """Raises out (hq,) to the largest scale * q·k of each head, without softmax and values."""
    walk = _Walk(q, k, k, mask, Scoring(scale=scale), BLOCK_M, BLOCK_N)
    for rows, q_tile, blocks in walk.tiles():
        for cols, seen in blocks:
            raw, _, _ = walk.logits(q_tile, rows, cols, seen)
            torch.maximum(out, raw.amax((2, 3)).flatten(), out=out)


class _Walk:
    """Tiles of one problem, with tensors brought to (hk, g, rows, dim) in the working dtype."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttnMask,
        scoring: Scoring,
        block_m: int,
        block_n: int,
    ) -> None:
        self.q, self.k, self.v, self.scoring = q, k, v, scoring
        self.plan: TilePlan = plan_tiles(mask, block_m, block_n)
        self.hk, self.g = k.shape[1], q.shape[1] // k.shape[1]
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        bias = scoring.bias
        full = (q.shape[1], q.shape[0], k.shape[0])
        self.bias = None if bias is None else bias.expand(full)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, hq, d) -> (hk, g, rows, d)."""
        return x.to(self.dtype).unflatten(1, (self.hk, self.g)).permute(1, 2, 0, 3).contiguous()

    def from_heads(self, x: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return x.permute(2, 0, 1, 3).flatten(1, 2)

    def k_tile(self, cols: slice) -> torch.Tensor:
        """(hk, 1, cols, d)"""
        return self.k[cols].to(self.dtype).transpose(0, 1)[:, None]

    def v_tile(self, cols: slice) -> torch.Tensor:
        """(hk, 1, cols, dv)"""
        return self.v[cols].to(self.dtype).transpose(0, 1)[:, None]

    def tiles(
        self,
    ) -> Iterator[tuple[slice, torch.Tensor, Iterator[tuple[slice, torch.Tensor | None]]]]:
        """(rows, q tile, blocks); a block is (cols, attended pairs or None when all)."""
        plan = self.plan
        for tile in range(plan.num_q_tiles):
            rows = slice(tile * plan.block_m, min((tile + 1) * plan.block_m, plan.tq))
            yield rows, self.to_heads(self.q[rows]), self._blocks(tile, rows)

    def _blocks(self, tile: int, rows: slice) -> Iterator[tuple[slice, torch.Tensor | None]]:
        plan, num_rows = self.plan, rows.stop - rows.start
        for start, end, row_set in plan.q.runs[plan.q.ptr[tile] : plan.q.ptr[tile + 1]].tolist():
            first, last = start * plan.block_n, min(end * plan.block_n, plan.tk)
            for col in range(first, last, MAX_COLUMNS):
                cols = slice(col, min(col + MAX_COLUMNS, last))
                if row_set < 0:
                    yield cols, None
                    continue
                key = torch.arange(cols.start, cols.stop, device=self.q.device)
                lo, hi = (x[row_set, :num_rows].to(self.q.device)[:, None] for x in plan.row_sets)
                yield cols, (key >= lo) & (key < hi)

    def logits(
        self, q_tile: torch.Tensor, rows: slice, cols: slice, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(raw logits, logits after softcap, d capped / d raw); both masked with -inf."""
        scoring = self.scoring
        raw = q_tile @ self.k_tile(cols).mT * scoring.scale
        if self.bias is not None:
            bias = self.bias[:, rows, cols].to(self.dtype)
            raw = raw + bias.unflatten(0, (self.hk, self.g))
        if scoring.alibi_slopes is not None:
            raw = raw + self._alibi(scoring.alibi_slopes, rows, cols)
        capped, slope = raw, None
        if scoring.softcap:
            bent = torch.tanh(raw / scoring.softcap)
            capped, slope = scoring.softcap * bent, 1 - bent * bent
        if seen is not None:
            raw, capped = raw.masked_fill(~seen, -torch.inf), capped.masked_fill(~seen, -torch.inf)
        return raw, capped, slope

    def _alibi(self, slopes: torch.Tensor, rows: slice, cols: slice) -> torch.Tensor:
        row = torch.arange(rows.start, rows.stop, device=slopes.device)
        offset = self.scoring.alibi_offset
        position = row + (self.plan.tk - self.plan.tq if offset is None else offset[rows].long())
        key = torch.arange(cols.start, cols.stop, device=slopes.device)
        distance = (position[:, None] - key).abs().to(self.dtype)
        return -slopes.to(self.dtype).view(self.hk, self.g, 1, 1) * distance


def _add_reduced(dbias: torch.Tensor, dlogits: torch.Tensor, rows: slice, cols: slice) -> None:
    """Adds (hq, rows, cols) into a bias gradient that may be broadcast along any dim."""
    broadcast = [dim for dim in range(3) if dbias.shape[dim] == 1 and dlogits.shape[dim] != 1]
    if broadcast:
        dlogits = dlogits.sum(broadcast, keepdim=True)
    part = dbias if dbias.shape[1] == 1 else dbias[:, rows]
    part = part if dbias.shape[2] == 1 else part[:, :, cols]
    part += dlogits
