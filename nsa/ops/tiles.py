"""The tiles that each branch is computed from, and attention over a list of tiles.

Every branch is the same computation over a different list of tiles: some query rows against a
run of keys, some entries hidden. A tile's softmax is merged into what its rows have seen so far,
and the backward pass walks the same tiles again. Sums are kept in float32 (float64 for float64
inputs), in a fixed order, so results and gradients are the same from run to run.

    compressed   rows of a tile x every compressed key that one of them can see
    window       rows of a tile x the positions from the first row's window to the last row
    selected     early rows x their whole past with the unchosen blocks hidden (most are chosen),
                 later rows grouped by block: block j x the rows that chose it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa.spec import NSASpec

# Rows (queries x heads of a group) of one tile: enough to keep matrix products busy, few enough
# that a tile's scores stay in the processor's cache.
TILE_ROWS = 384
GATHERED_ROWS = 3072
# Early rows walk their whole past while it has at most this many times n blocks: the products
# wasted on unchosen blocks cost less than gathering the rows of each block.
DENSE_BLOCKS = 2
# Stands for a hidden score. Finite, so that a row with everything hidden makes no NaN.
HIDDEN = -1e30


@dataclass
class Tile:
    """Some rows against a run of keys, `hidden` marking (rows, keys, mask) that are not seen."""

    rows: slice | Tensor
    keys: slice
    hidden: list[tuple[slice, slice, Tensor]] = field(default_factory=list)
    whole: bool = True  # its rows see no key outside this tile

    def scores(self, q_TGD: Tensor, k_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The tile's queries [R*G, D] and their masked scores [R*G, N]."""
        q = q_TGD[self.rows] if isinstance(self.rows, slice) else q_TGD.index_select(0, self.rows)
        group, q = q.shape[1], q.flatten(0, 1)
        score = q @ k_ND[self.keys].T
        by_row = score.unflatten(0, (-1, group))
        for rows, keys, mask in self.hidden:
            by_row[rows, :, keys].masked_fill_(mask[:, None], HIDDEN)
        return q, score


def compressed_tiles(seq_len: int, spec: NSASpec, group: int, device: torch.device) -> list[Tile]:
    """Rows against the compressed keys that end at or before them; blind rows have no tile."""
    step = max(1, TILE_ROWS // group)
    tiles = []
    for start in range(spec.block_len - 1, seq_len, step):
        stop = min(start + step, seq_len)
        row = torch.arange(start, stop, device=device)[:, None]
        first, last = spec.visible_compressed(start), spec.visible_compressed(stop - 1)
        end = torch.arange(first, last, device=device) * spec.block_stride + spec.block_len - 1
        hidden = (slice(None), slice(first, last), end > row)
        tiles.append(Tile(slice(start, stop), slice(0, last), [hidden]))
    return tiles


def window_tiles(seq_len: int, window: int, group: int, device: torch.device) -> list[Tile]:
    """Rows against the positions in their window; only a tile's two ends need a mask."""
    step = max(1, TILE_ROWS // group)
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
                hidden.append((slice(None), columns, (key > row) | (key <= row - window)))
        tiles.append(Tile(slice(start, stop), slice(low, stop), hidden))
    return tiles


def selected_tiles(block_index_Tn: Tensor, spec: NSASpec, group: int) -> Iterator[Tile]:
    """The tiles of one KV head of one document, from its queries' chosen blocks."""
    seq_len = block_index_Tn.shape[0]
    switch = min(seq_len, DENSE_BLOCKS * spec.select_top * spec.select_len)
    yield from _early_tiles(block_index_Tn, switch, spec, group)
    if switch < seq_len:
        yield from _gathered_tiles(block_index_Tn, switch, spec, group)


def _early_tiles(block_index: Tensor, switch: int, spec: NSASpec, group: int) -> Iterator[Tile]:
    step = max(1, TILE_ROWS // group)
    for start in range(0, switch, step):
        stop = min(start + step, switch)
        row = torch.arange(start, stop, device=block_index.device)[:, None]
        chosen = _chosen(block_index[start:stop], spec.select_blocks_len(stop))
        own = slice(start, stop)
        key = torch.arange(start, stop, device=block_index.device)
        hidden = [(slice(None), own, key > row)]
        if not bool(chosen.all()):
            mask = ~chosen.repeat_interleave(spec.select_len, 1)[:, :stop]
            hidden.append((slice(None), slice(0, stop), mask))
        yield Tile(slice(start, stop), slice(0, stop), hidden)


def _chosen(block_index_Rn: Tensor, blocks: int) -> Tensor:
    """Which of the first `blocks` blocks each row chose: bool [R, M]."""
    index = torch.where((block_index_Rn < 0) | (block_index_Rn >= blocks), blocks, block_index_Rn)
    chosen = torch.zeros(len(index), blocks + 1, dtype=torch.bool, device=index.device)
    return chosen.scatter_(1, index.long(), True)[:, :blocks]


def _gathered_tiles(block_index: Tensor, switch: int, spec: NSASpec, group: int) -> Iterator[Tile]:
    seq_len, device = block_index.shape[0], block_index.device
    blocks = spec.select_blocks_len(seq_len)
    row = torch.arange(switch, seq_len, device=device)[:, None]
    index = block_index[switch:].long()
    pair = (index * seq_len + row)[(index >= 0) & (index <= row // spec.select_len)]
    pair = pair.unique()  # by block, then by row; a block named twice counts once
    rows = pair % seq_len
    count = torch.bincount(pair // seq_len, minlength=blocks).tolist()
    step = max(1, GATHERED_ROWS // group)
    offset = 0
    for block, many in enumerate(count):
        first = block * spec.select_len
        keys = slice(first, min(first + spec.select_len, seq_len))
        key = torch.arange(keys.start, keys.stop, device=device)
        for start in range(offset, offset + many, step):
            some = rows[start : min(start + step, offset + many)]
            # Rows ascend, so those inside the block itself come first.
            inside = int((some < keys.stop).sum())
            mask = key > some[:inside, None]
            yield Tile(some, keys, [(slice(0, inside), slice(None), mask)], whole=False)
        offset += many


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile], o: Tensor, lse: Tensor) -> None:
    """Fill `o` [T, G, Dv] and `lse` [T, G] (0 and -inf before) from the tiles of one KV head."""
    for tile in tiles:
        _, score = tile.scores(q, k)
        top = score.amax(-1)
        p = score.softmax(-1)
        # The largest probability is exp(top - lse), which saves a pass over the scores.
        tile_lse = (top - p.amax(-1).log()).unflatten(0, (-1, q.shape[1]))
        tile_o = (p @ v[tile.keys]).unflatten(0, (-1, q.shape[1]))
        nothing = tile_lse < HIDDEN / 2
        if tile.whole:
            o[tile.rows] = tile_o.masked_fill_(nothing[..., None], 0)
            lse[tile.rows] = tile_lse.masked_fill_(nothing, -torch.inf)
            continue
        old_lse = lse[tile.rows]
        new_lse = torch.logaddexp(old_lse, tile_lse)
        old_o = o[tile.rows].mul_((old_lse - new_lse).exp_()[..., None])
        old_o.addcmul_(tile_o, (tile_lse - new_lse).exp_()[..., None])
        o[tile.rows] = old_o
        lse[tile.rows] = new_lse


def attend_backward(
    saved: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    tiles: Iterable[Tile],
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add to the gradients of one KV head's (q, k, v); `saved` is (do, Σ do·o − dlse, lse)."""
    do, delta, lse = saved
    q, k, v = inputs
    dq, dk, dv = grads
    for tile in tiles:
        q_tile, score = tile.scores(q, k)
        p = score.softmax(-1) if tile.whole else (score - lse[tile.rows].reshape(-1, 1)).exp_()
        do_tile = do[tile.rows].flatten(0, 1)
        dv[tile.keys].addmm_(p.T, do_tile)
        ds = do_tile @ v[tile.keys].T
        ds = ds.sub_(delta[tile.rows].reshape(-1, 1)).mul_(p)
        dk[tile.keys].addmm_(ds.T, q_tile)
        dq_tile = (ds @ k[tile.keys]).unflatten(0, (-1, q.shape[1]))
        if isinstance(tile.rows, slice):
            dq[tile.rows] += dq_tile
        else:
            dq.index_add_(0, tile.rows, dq_tile)  # a tile names a row once: the order is fixed
