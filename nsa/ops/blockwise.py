"""Blockwise backend: Native Sparse Attention in PyTorch, tile by tile; any device, memory O(T).

All branches run the same computation over different tiles: query rows against a slice of keys, with
a mask. A tile's softmax is merged into the running softmax of its rows; the backward pass goes over
the same tiles again. Sums are float32 (float64 for float64 inputs) in a fixed order, so results and
gradients have the same bits in every run.

    compressed   rows of a tile x all compressed keys that any of them sees
    window       rows of a tile x the positions from the first row's window to the last row
    selected     early rows x all earlier positions, with unselected blocks (few) masked;
                 later rows, for each block j: the rows that selected j x the positions of j

Sizes in names: B batch, T queries, N keys, H query heads, K KV heads, G query heads per KV head,
M selection blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import AttentionInputs, SelectionInputs, compressed_slices, document_slices
from nsa.spec import NSASpec

# KV heads in one tile: a batched matrix product gives each CPU core its own head, which is faster
# than several cores sharing one product.
HEADS = 4
# Rows of one tile, queries x heads: enough to keep matrix products busy, few enough that a tile's
# scores stay in the CPU's cache.
TILE_ROWS = 768
GATHERED_ROWS = 3072  # of a tile of later rows in the selected branch
# Early rows of the selected branch attend densely with a mask: computing their unselected blocks
# costs less than gathering the rows of each block. They are the first EARLY_BLOCKS · n · l' rows;
# with small blocks more, EARLY_PAIRS / l', because gathering has a fixed cost per block.
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
    biases: list[tuple[slice, slice, Tensor]]  # (rows, keys, HIDDEN at masked entries, else 0)
    heads: slice = field(default_factory=lambda: slice(None))
    complete: bool = True  # its rows see no keys outside this tile

    def scores(self, q_KTGD: Tensor, k_KND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tile's queries [K, R*G, D] and their masked scores [K, R*G, N]."""
        q = self.rows_of(q_KTGD)
        group, q = q.shape[2], q.flatten(1, 2)
        score = q @ k_KND[self.heads, self.keys].mT
        by_row = score.unflatten(1, (-1, group))
        for rows, keys, bias in self.biases:
            by_row[:, rows, :, keys].add_(bias.unsqueeze(-2))
        return q, score

    def rows_of(self, x_KT: Tensor) -> Tensor:
        """Return x in the tile's heads and rows."""
        x = x_KT[self.heads]
        return x[:, self.rows] if isinstance(self.rows, slice) else x.index_select(1, self.rows)


def queries_per_tile(heads: int, group: int) -> int:
    """Return the queries of a tile with `heads` KV heads."""
    return max(1, TILE_ROWS // (heads * group))


def band_tiles(
    seq_len: int, length: int, stride: int, window: int, step: int, device: torch.device
) -> list[Tile]:
    """Return the tiles of the compressed branch or of the window; rows that see no key are in none.

    A row sees key n iff n · stride + length - 1 <= row and n > row - window. Only the first and the
    last keys of a tile need a mask, because some rows of the tile do not see them.
    """
    tiles = []
    for start in range(length - 1, seq_len, step):
        stop = min(start + step, seq_len)
        low = max(0, start - window + 1)
        high = (stop - length) // stride + 1
        unseen_by_last_row = range(low, stop - window)
        unseen_by_first_row = range((start + 1 - length) // stride + 1, high)
        row = torch.arange(start, stop, device=device)[:, None]
        biases = []
        for keys in (unseen_by_last_row, unseen_by_first_row):
            if keys:
                key = torch.arange(keys.start, keys.stop, device=device)
                outside = (key * stride + length - 1 > row) | (key <= row - window)
                columns = slice(keys.start - low, keys.stop - low)
                biases.append((slice(None), columns, _bias(outside)))
        tiles.append(Tile(slice(start, stop), slice(low, high), biases))
    return tiles


def selected_tiles(block_index_KTn: Tensor, spec: NSASpec, group: int) -> Iterator[Tile]:
    """Yield the tiles of the selected branch for K KV heads and one document."""
    heads, seq_len = block_index_KTn.shape[:2]
    early = max(EARLY_BLOCKS * spec.select_top * spec.select_len, EARLY_PAIRS // spec.select_len)
    switch = min(seq_len, early)
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
        biases = [(slice(None), own, _bias(key > row))]
        if not bool(selected.all()):
            bias = _bias(~selected).repeat_interleave(spec.select_len, -1)[..., :stop]
            biases.append((slice(None), slice(0, stop), bias))
        yield Tile(own, slice(0, stop), biases)


def _bias(mask: Tensor) -> Tensor:
    return mask.float().mul_(HIDDEN)


def _one_hot(block_index_KRn: Tensor, blocks: int) -> Tensor:
    """Return which of the first M = `blocks` blocks each row selected: bool [K, R, M]."""
    outside = (block_index_KRn < 0) | (block_index_KRn >= blocks)
    index = torch.where(outside, blocks, block_index_KRn).long()
    selected = torch.zeros(*index.shape[:2], blocks + 1, dtype=torch.bool, device=index.device)
    return selected.scatter_(-1, index, True)[..., :blocks]


def _gathered_tiles(block_index: Tensor, switch: int, spec: NSASpec, group: int) -> Iterator[Tile]:
    seq_len, device = block_index.shape[0], block_index.device
    blocks = spec.select_blocks_len(seq_len)
    row = torch.arange(switch, seq_len, device=device)[:, None]
    index = block_index[switch:].long()
    selected = (index >= 0) & (index <= row // spec.select_len)
    pair = (index * seq_len + row)[selected].unique()  # by block, then by row; no duplicates
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
    """Fill `o` [K, T, G, Dv], which holds 0, and `lse` [K, T, G], which holds -inf, from tiles."""
    group = q.shape[2]
    for tile in tiles:
        _, score = tile.scores(q, k)
        highest = score.amax(-1)
        p = score.softmax(-1)
        # The largest probability is exp(highest - lse), which gives lse without another pass.
        tile_lse = (highest - p.amax(-1).log()).unflatten(1, (-1, group))
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
    """Add the gradients of (q, k, v) to `grads`; `saved` is (do, delta = Σ do·o − dlse, lse)."""
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


def _by_head(x: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return q · scale [B*K, T, G, Dk], k [B*K, N, Dk] and v, in the dtype of sums."""
    q, k, v = (by_group(y, x.k.shape[2]) for y in (x.q, x.k, x.v))
    return q.mul(x.scale), k[:, :, 0], v[:, :, 0]


def _tiles(
    x: AttentionInputs,
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], Iterable[Tile]]]:
    """Yield (heads, rows), (heads, keys) and tiles of a document, HEADS KV heads at a time."""
    (batch, seq_len), kv_heads = x.q.shape[:2], x.k.shape[2]
    spec, device, group = x.spec, x.q.device, x.q.shape[2] // kv_heads
    step = queries_per_tile(min(batch * kv_heads, HEADS), group)
    key_slices = documents = document_slices(seq_len, x.cu_seqlens)
    if x.branch == "compressed":
        key_slices = compressed_slices(seq_len, x.cu_seqlens, spec)
    elif x.block_index is not None:
        index = x.block_index.transpose(1, 2).flatten(0, 1)  # [B*K, T, n]
    for rows, keys in zip(documents, key_slices, strict=True):
        length = rows.stop - rows.start
        tiles: Iterable[Tile] = []  # the same for all heads, unless they select blocks
        if x.branch == "compressed":
            tiles = band_tiles(length, spec.block_len, spec.block_stride, length, step, device)
        elif x.branch == "window":
            tiles = band_tiles(length, 1, 1, spec.window, step, device)
        for head_slice in head_slices(batch * kv_heads):
            if x.branch == "selected":
                tiles = selected_tiles(index[head_slice, rows], spec, group)
            yield (head_slice, rows), (head_slice, keys), tiles


def head_slices(count: int) -> list[slice]:
    """Return slices of `count` KV heads, at most HEADS in each."""
    return [slice(start, start + HEADS) for start in range(0, count, HEADS)]


def by_group(x_BTHD: Tensor, kv_heads: int) -> Tensor:
    """Return [B, T, H, D] as contiguous [B*K, T, G, D], in float32 (float64 stays float64)."""
    dtype = torch.promote_types(x_BTHD.dtype, torch.float32)
    x = x_BTHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 1, 3, 4)
    return x.to(dtype).contiguous().flatten(0, 1)


def by_token(x_KTGD: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """Return [B*K, T, G, D] as contiguous [B, T, H, D]: the inverse of `by_group`."""
    x = x_KTGD.unflatten(0, (batch, -1)).permute(0, 2, 1, 3, 4)
    return x.flatten(2, 3).to(dtype).contiguous()


def _forward(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.q.device.type, enabled=False):
        q, k, v = _by_head(x)
        o = q.new_zeros(*q.shape[:3], v.shape[-1])
        lse = q.new_full(q.shape[:3], -torch.inf)
        for rows, keys, tiles in _tiles(x):
            attend(q[rows], k[keys], v[keys], tiles, o[rows], lse[rows])
        batch = len(x.q)
        return by_token(o, batch, x.q.dtype), by_token(lse[..., None], batch, lse.dtype)[..., 0]


def _backward(
    do: Tensor, dlse: Tensor, x: AttentionInputs, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.q.device.type, enabled=False):
        q, k, v = _by_head(x)
        kv_heads, batch = x.k.shape[2], len(x.q)
        lse, dlse = (by_group(y[..., None], kv_heads)[..., 0] for y in (lse, dlse))  # [B*K, T, G]
        blind = lse == -torch.inf
        do = by_group(do, kv_heads).masked_fill(blind[..., None], 0)
        delta = (do * by_group(o, kv_heads)).sum(-1).sub(dlse).masked_fill(blind, 0)
        dq, dk, dv = (torch.zeros_like(y) for y in (q, k, v))
        for rows, keys, tiles in _tiles(x):
            attend_backward(
                (do[rows], delta[rows], lse[rows]),
                (q[rows], k[keys], v[keys]),
                tiles,
                (dq[rows], dk[keys], dv[keys]),
            )
        return (
            by_token(dq.mul_(x.scale), batch, x.q.dtype),
            by_token(dk[:, :, None], batch, x.k.dtype),
            by_token(dv[:, :, None], batch, x.v.dtype),
        )


attention = register(  # one branch's attention: (o, lse)
    "nsa::blockwise_attention",
    AttentionInputs,
    _forward,
    AttentionInputs.empty_outputs,
    outputs=2,
    gradient=Gradient(_backward, inputs=3, outputs=2),
)


def _select(x: SelectionInputs) -> Tensor:
    """Return the blocks that each query selects, int32 [B, T, K, n]."""
    kv_heads, (batch, queries) = x.k_cmp.shape[2], x.q.shape[:2]
    with torch.autocast(x.q.device.type, enabled=False):
        q, k = by_group(x.q, kv_heads).mul(x.scale), by_group(x.k_cmp, kv_heads)[:, :, 0]
        lse = None if x.lse is None else by_group(x.lse[..., None], kv_heads)[..., 0]
        index = torch.full((batch * kv_heads, queries, x.spec.select_top), -1, device=q.device)
        documents = document_slices(queries, x.cu_seqlens)
        blocks = compressed_slices(x.seq_len, x.cu_seqlens, x.spec)
        for rows, keys in zip(documents, blocks, strict=True):
            length = x.seq_len if x.cu_seqlens is None else rows.stop - rows.start
            for heads in head_slices(batch * kv_heads):
                lse_rows = None if lse is None else lse[heads, rows]
                inputs = q[heads, rows], k[heads, keys], lse_rows
                _fill_index(*inputs, x.spec, length, index[heads, rows])
        index = index.unflatten(0, (batch, kv_heads)).transpose(1, 2)
        return index.to(torch.int32).contiguous()


def _fill_index(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, spec: NSASpec, seq_len: int, index: Tensor
) -> None:
    """Fill `index` [K, T, n] for K KV heads and the last T positions of one document."""
    heads, queries, group = q.shape[:3]
    step = queries_per_tile(heads, group)
    blocks, weights = overlap_table(seq_len, spec, q.dtype, q.device)
    before = seq_len - queries  # positions before the first query
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        position = torch.arange(before + start, before + stop, device=q.device)[:, None]
        own = position // spec.select_len
        candidates = spec.select_blocks_len(before + stop)
        block = torch.arange(candidates, device=q.device)
        if candidates <= spec.select_top:
            index[:, start:stop, :candidates] = torch.where(block <= own, block, -1)
            continue
        seen = spec.visible_compressed(before + stop - 1)
        score = q[:, start:stop].flatten(1, 2) @ k_cmp[:, :seen].mT
        end = torch.arange(seen, device=q.device) * spec.block_stride + spec.block_len - 1
        table = blocks[:, :candidates], weights[:, :candidates]
        if lse is None:  # one query head per KV head
            importance = log_sum_overlaps(score.masked_fill_(end > position, -torch.inf), *table)
        else:
            p = score.sub_(lse[:, start:stop].flatten(1)[..., None]).exp_()
            p = p.unflatten(1, (-1, group)).sum(2)  # [K, R, N]
            importance = sum_overlaps(p.masked_fill_(end > position, 0), *table)
        index[:, start:stop] = top_blocks(importance, own, spec)


def sum_overlaps(p: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    """Return importance [.., M] from probabilities [.., N] of compressed blocks."""
    padded = torch.nn.functional.pad(p, (0, 1))  # indices past the last block read this 0
    total = p.new_zeros(*p.shape[:-1], blocks.shape[1])
    for index, weight in zip(blocks, weights, strict=True):  # in a fixed order: ties stay exact
        total += padded.index_select(-1, index.clamp(max=p.shape[-1])) * weight
    return total


def log_sum_overlaps(score: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    """Return the logarithm of `sum_overlaps` of exp(score), without overflow."""
    padded = torch.nn.functional.pad(score, (0, 1), value=-torch.inf)
    scores = padded[..., blocks.T.clamp(max=score.shape[-1])]  # [.., M, c]
    return (scores + weights.T.log()).logsumexp(-1)


def top_blocks(importance: Tensor, own: Tensor, spec: NSASpec) -> Tensor:
    """Return the top n blocks of each row of `importance` [K, R, M], M > n; ascending, then -1.

    `topk` may return either of two equal scores, so only its n-th score is used: blocks above this
    score are selected, and of the blocks with this score those with the lowest indices.
    """
    block = torch.arange(importance.shape[-1], device=importance.device)
    always = (block < spec.init_blocks) | (block > own - spec.local_blocks)
    score = importance.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
    least = score.topk(spec.select_top, -1).values[..., -1:]
    above, equal = score > least, score == least
    left = spec.select_top - above.sum(-1, keepdim=True)
    selected = (above | (equal & (equal.cumsum(-1) <= left))) & (block <= own)
    index = torch.where(selected, block, importance.shape[-1])
    index = index.topk(spec.select_top, -1, largest=False).values.sort(-1).values
    return torch.where(index < importance.shape[-1], index, -1)


@lru_cache(maxsize=16)
def overlap_table(
    seq_len: int, spec: NSASpec, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the c compressed blocks that overlap each selection block, and overlap/d: [c, M]."""
    length, stride, size = spec.block_len, spec.block_stride, spec.select_len
    first = torch.arange(spec.select_blocks_len(seq_len), device=device) * size
    low = torch.div(first - length, stride, rounding_mode="floor") + 1  # first that ends after it
    block = low + torch.arange(spec.max_overlaps, device=device)[:, None]
    start = block * stride
    shared = torch.minimum(start + length, first + size) - torch.maximum(start, first)
    valid = (block >= 0) & (block < spec.compressed_len(seq_len))
    weight = torch.where(valid, shared.clamp(min=0), 0).to(dtype) / stride
    return block.clamp(min=0), weight


select_blocks = register(
    "nsa::blockwise_select_blocks", SelectionInputs, _select, fake=SelectionInputs.empty_index
)
