"""Tiled attention in PyTorch: the tiles of each branch, and their forward and backward pass.

All branches run the same computation over different tiles: query rows against a slice of keys, with
a mask. A tile's softmax is merged into the running softmax of its rows; the backward pass goes over
the same tiles again. Sums are float32 (float64 for float64 inputs) in a fixed order, so results and
gradients are bitwise reproducible.

    compressed   rows of a tile x all compressed keys that any of them sees
    window       rows of a tile x the positions from the first row's window to the last row
    selected     early rows x all earlier positions, with unselected blocks (few) masked;
                 later rows by block: the rows that selected block j x block j
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa.spec import NSASpec

# KV heads in one tile: a batched matrix product gives each CPU core its own head, which is faster
# than several cores sharing one product.
HEADS = 4
# Rows of one tile, queries x heads: enough to keep matrix products busy, few enough that a tile's
# scores stay in the CPU's cache.
TILE_ROWS = 768
GATHERED_ROWS = 3072
# Selected branch: rows among the first EARLY_BLOCKS · n blocks, or the first EARLY_PAIRS / l'
# positions, attend densely with a mask. There computing unselected blocks costs less than gathering
# the rows of each block, which also has a fixed cost per block.
EARLY_BLOCKS = 2
EARLY_PAIRS = 8_192
# Added to a masked score; finite, so that a fully masked row gives no NaN. On a CPU, `add_` is 5 to
# 40 times as fast as `masked_fill_`.
HIDDEN = -1e30


@dataclass
class Tile:
    """Query rows against a slice of keys, in a slice of KV heads."""

    rows: slice | Tensor
    keys: slice
    hidden: list[tuple[slice, slice, Tensor]]  # (rows, keys, HIDDEN at masked entries, else 0)
    heads: slice = field(default_factory=lambda: slice(None))
    complete: bool = True  # its rows see no keys outside this tile

    def scores(self, q_KTGD: Tensor, k_KND: Tensor) -> tuple[Tensor, Tensor]:
        """The tile's queries [K, R*G, D] and their masked scores [K, R*G, N]."""
        q = self.rows_of(q_KTGD)
        group, q = q.shape[2], q.flatten(1, 2)
        score = q @ k_KND[self.heads, self.keys].mT
        by_row = score.unflatten(1, (-1, group))
        for rows, keys, bias in self.hidden:
            by_row[:, rows, :, keys].add_(bias.unsqueeze(-2))
        return q, score

    def rows_of(self, x_KT: Tensor) -> Tensor:
        """The tile's heads and rows of x."""
        x = x_KT[self.heads]
        return x[:, self.rows] if isinstance(self.rows, slice) else x.index_select(1, self.rows)


def queries_per_tile(heads: int, group: int) -> int:
    """Queries per tile, for `heads` KV heads in the tile."""
    return max(1, TILE_ROWS // (heads * group))


def compressed_tiles(seq_len: int, spec: NSASpec, step: int, device: torch.device) -> list[Tile]:
    """Tiles of the compressed branch; rows that see no compressed key are in none."""
    tiles = []
    for start in range(spec.block_len - 1, seq_len, step):
        stop = min(start + step, seq_len)
        row = torch.arange(start, stop, device=device)[:, None]
        first, last = spec.visible_compressed(start), spec.visible_compressed(stop - 1)
        end = torch.arange(first, last, device=device) * spec.block_stride + spec.block_len - 1
        hidden = (slice(None), slice(first, last), _bias(end > row))
        tiles.append(Tile(slice(start, stop), slice(0, last), [hidden]))
    return tiles


def window_tiles(seq_len: int, window: int, step: int, device: torch.device) -> list[Tile]:
    """Tiles of the window branch; only the first and last keys of a tile need a mask."""
    tiles = []
    for start in range(0, seq_len, step):
        stop = min(start + step, seq_len)
        low = max(0, start - window + 1)
        row = torch.arange(start, stop, device=device)[:, None]
        hidden = []
        entering = slice(low, max(low, stop - window))
        leaving = slice(start, stop)
        for part in (entering, leaving):
            key = torch.arange(part.start, part.stop, device=device)
            if len(key):
                columns = slice(part.start - low, part.stop - low)
                outside = (key > row) | (key <= row - window)
                hidden.append((slice(None), columns, _bias(outside)))
        tiles.append(Tile(slice(start, stop), slice(low, stop), hidden))
    return tiles


def selected_tiles(block_index_KTn: Tensor, spec: NSASpec, group: int) -> Iterator[Tile]:
    """Tiles of the selected branch for K KV heads and one document."""
    heads, seq_len = block_index_KTn.shape[:2]
    size = spec.select_len
    switch = min(seq_len, max(EARLY_BLOCKS * spec.select_top * size, EARLY_PAIRS // size))
    yield from _early_tiles(block_index_KTn, switch, spec, queries_per_tile(heads, group))
    if switch < seq_len:
        for head in range(heads):
            for tile in _gathered_tiles(block_index_KTn[head], switch, spec, group):
                tile.heads = slice(head, head + 1)
                yield tile


def _early_tiles(block_index: Tensor, switch: int, spec: NSASpec, step: int) -> Iterator[Tile]:
    for start in range(0, switch, step):
        stop = min(start + step, switch)
        row = torch.arange(start, stop, device=block_index.device)[:, None]
        selected = _one_hot(block_index[:, start:stop], spec.select_blocks_len(stop))
        own = slice(start, stop)
        key = torch.arange(start, stop, device=block_index.device)
        hidden = [(slice(None), own, _bias(key > row))]
        if not bool(selected.all()):
            bias = _bias(~selected).repeat_interleave(spec.select_len, -1)[..., :stop]
            hidden.append((slice(None), slice(0, stop), bias))
        yield Tile(own, slice(0, stop), hidden)


def _bias(mask: Tensor) -> Tensor:
    return mask.float().mul_(HIDDEN)


def _one_hot(block_index_KRn: Tensor, blocks: int) -> Tensor:
    """Mask of selected blocks among the first M = `blocks`: bool [K, R, M]."""
    outside = (block_index_KRn < 0) | (block_index_KRn >= blocks)
    index = torch.where(outside, blocks, block_index_KRn).long()
    selected = torch.zeros(*index.shape[:2], blocks + 1, dtype=torch.bool, device=index.device)
    return selected.scatter_(-1, index, True)[..., :blocks]


def _gathered_tiles(block_index: Tensor, switch: int, spec: NSASpec, group: int) -> Iterator[Tile]:
    seq_len, device = block_index.shape[0], block_index.device
    blocks = spec.select_blocks_len(seq_len)
    row = torch.arange(switch, seq_len, device=device)[:, None]
    index = block_index[switch:].long()
    pair = (index * seq_len + row)[(index >= 0) & (index <= row // spec.select_len)]
    pair = pair.unique()  # by block, then by row; duplicates count once
    rows = pair % seq_len
    counts = torch.bincount(pair // seq_len, minlength=blocks).tolist()
    step = max(1, GATHERED_ROWS // group)
    offset = 0
    for block, count in enumerate(counts):
        first = block * spec.select_len
        keys = slice(first, min(first + spec.select_len, seq_len))
        key = torch.arange(keys.start, keys.stop, device=device)
        for start in range(offset, offset + count, step):
            tile_rows = rows[start : min(start + step, offset + count)]
            # Rows ascend, so queries inside the block come first; only they need a causal mask.
            inside = int((tile_rows < keys.stop).sum())
            bias = _bias(key > tile_rows[:inside, None])
            yield Tile(tile_rows, keys, [(slice(0, inside), slice(None), bias)], complete=False)
        offset += count


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile], o: Tensor, lse: Tensor) -> None:
    """Fill `o` [K, T, G, Dv] and `lse` [K, T, G] (0 and -inf before) from the tiles."""
    group = q.shape[2]
    for tile in tiles:
        _, score = tile.scores(q, k)
        top = score.amax(-1)
        p = score.softmax(-1)
        # The largest probability is exp(top - lse): lse without another pass over the scores.
        tile_lse = (top - p.amax(-1).log()).unflatten(1, (-1, group))
        tile_o = (p @ v[tile.heads, tile.keys]).unflatten(1, (-1, group))
        if not tile.complete:
            old_lse = tile.rows_of(lse)
            new_lse = torch.logaddexp(old_lse, tile_lse)
            old_o = tile.rows_of(o).mul_((old_lse - new_lse).exp_()[..., None])
            tile_o = old_o.addcmul_(tile_o, (tile_lse - new_lse).exp_()[..., None])
            tile_lse = new_lse
        blind = tile_lse < HIDDEN / 2
        o[tile.heads][:, tile.rows] = tile_o.masked_fill_(blind[..., None], 0)
        lse[tile.heads][:, tile.rows] = tile_lse.masked_fill_(blind, -torch.inf)


def attend_backward(
    saved: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    tiles: Iterable[Tile],
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add to the gradients of (q, k, v); `saved` is (do, Σ do·o − dlse, lse)."""
    do, delta, lse = saved
    q, k, v = inputs
    dq, dk, dv = grads
    group = q.shape[2]
    for tile in tiles:
        q_tile, score = tile.scores(q, k)
        if tile.complete:
            p = score.softmax(-1)
        else:
            p = score.sub_(tile.rows_of(lse).flatten(1)[..., None]).exp_()
        do_tile = tile.rows_of(do).flatten(1, 2)
        dv[tile.heads, tile.keys].baddbmm_(p.mT, do_tile)
        ds = do_tile @ v[tile.heads, tile.keys].mT
        ds = ds.sub_(tile.rows_of(delta).flatten(1)[..., None]).mul_(p)
        dk[tile.heads, tile.keys].baddbmm_(ds.mT, q_tile)
        dq_tile = (ds @ k[tile.heads, tile.keys]).unflatten(1, (-1, group))
        if isinstance(tile.rows, slice):
            dq[tile.heads, tile.rows] += dq_tile
        else:  # rows of a tile are unique, so the order of the sum is fixed
            dq[tile.heads].index_add_(1, tile.rows, dq_tile)
