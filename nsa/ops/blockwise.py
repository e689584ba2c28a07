"""Blockwise backend: Native Sparse Attention in PyTorch, tile by tile; any device, memory O(T).

`tiles.py` computes a list of tiles; this file loops over documents and KV heads, registers the
custom ops and their gradient, and ends with the backend's entry points. Sizes in names: B batch,
T queries, N keys, H query heads, K KV heads, G query heads per KV head, M selection blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.documents import compressed_slices, document_slices
from nsa.ops.inputs import AttentionInputs, SelectionInputs
from nsa.ops.tiles import (
    HEADS,
    Tile,
    attend,
    attend_backward,
    compressed_tiles,
    queries_per_tile,
    selected_tiles,
    window_tiles,
)
from nsa.spec import NSASpec


def _by_head(x: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q · scale [B*K, T, G, Dk], k [B*K, N, Dk] and v, in the dtype of sums."""
    q = by_group(x.q, x.k.shape[2]).mul(x.scale)
    return q, by_group(x.k)[:, :, 0], by_group(x.v)[:, :, 0]


def _tiles(
    x: AttentionInputs,
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], Iterable[Tile]]]:
    """Yield (heads, rows), (heads, keys) and tiles of a document, HEADS KV heads at a time."""
    (batch, seq_len, heads, _), spec, device = x.q.shape, x.spec, x.q.device
    count, group = batch * x.k.shape[2], heads // x.k.shape[2]
    step = queries_per_tile(min(count, HEADS), group)
    keys = documents = document_slices(seq_len, x.cu_seqlens)
    if x.branch == "compressed":
        keys = compressed_slices(seq_len, x.cu_seqlens, spec)
    elif x.block_index is not None:
        index = x.block_index.transpose(1, 2).flatten(0, 1)  # [B*K, T, n]
    for rows, run in zip(documents, keys, strict=True):
        length = rows.stop - rows.start
        tiles: Iterable[Tile] = []
        if x.branch == "compressed":
            tiles = compressed_tiles(length, spec, step, device)
        elif x.branch == "window":
            tiles = window_tiles(length, spec.window, step, device)
        for kv_heads in head_slices(count):
            if x.branch == "selected":
                tiles = selected_tiles(index[kv_heads, rows], spec, group)
            yield (kv_heads, rows), (kv_heads, run), tiles


def head_slices(count: int) -> list[slice]:
    """Slices of at most HEADS out of `count` KV heads."""
    return [slice(start, start + HEADS) for start in range(0, count, HEADS)]


def by_group(x_BTHD: Tensor, groups: int | None = None) -> Tensor:
    """[B, T, H, D] to contiguous [B*K, T, G, D] in float32 (float64 stays float64)."""
    dtype = torch.promote_types(x_BTHD.dtype, torch.float32)
    x = x_BTHD.unflatten(2, (groups or x_BTHD.shape[2], -1)).permute(0, 2, 1, 3, 4)
    return x.to(dtype).contiguous().flatten(0, 1)


def by_token(x_KTGD: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `by_group`: [B*K, T, G, D] to contiguous [B, T, H, D]."""
    x = x_KTGD.unflatten(0, (batch, -1)).permute(0, 2, 1, 3, 4)
    return x.flatten(2, 3).to(dtype).contiguous()


def _forward(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.q.device.type, enabled=False):
        q, k, v = _by_head(x)
        o = q.new_zeros(*q.shape[:3], v.shape[-1])
        lse = q.new_full(q.shape[:3], -torch.inf)
        for rows, run, tiles in _tiles(x):
            attend(q[rows], k[run], v[run], tiles, o[rows], lse[rows])
        batch = len(x.q)
        return by_token(o, batch, x.q.dtype), by_token(lse[..., None], batch, lse.dtype)[..., 0]


def _backward(
    do: Tensor, dlse: Tensor, x: AttentionInputs, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.q.device.type, enabled=False):
        q, k, v = _by_head(x)
        groups, batch = x.k.shape[2], len(x.q)
        lse = by_group(lse[..., None], groups)
        blind = lse == -torch.inf
        do = by_group(do, groups).masked_fill(blind, 0)
        delta = (do * by_group(o, groups)).sum(-1, keepdim=True) - by_group(dlse[..., None], groups)
        delta = delta.masked_fill(blind, 0)
        dq, dk, dv = (torch.zeros_like(y) for y in (q, k, v))
        for rows, run, tiles in _tiles(x):
            attend_backward(
                (do[rows], delta[rows][..., 0], lse[rows][..., 0]),
                (q[rows], k[run], v[run]),
                tiles,
                (dq[rows], dk[run], dv[run]),
            )
        return (
            by_token(dq.mul_(x.scale), batch, x.q.dtype),
            by_token(dk[:, :, None], batch, x.k.dtype),
            by_token(dv[:, :, None], batch, x.v.dtype),
        )


def _fake(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    return x.q.new_empty(*x.q.shape[:3], x.v.shape[-1]), x.q.new_empty(x.q.shape[:3], dtype=dtype)


blockwise_attention = register(
    "nsa::blockwise_attention",
    AttentionInputs,
    _forward,
    _fake,
    outputs=2,
    gradient=Gradient(_backward, inputs=3, outputs=2),
)


def _select(x: SelectionInputs) -> Tensor:
    """The blocks that each query selects: int32 [B, T, K, n]."""
    groups, (batch, queries) = x.k_cmp.shape[2], x.q.shape[:2]
    with torch.autocast(x.q.device.type, enabled=False):
        q, k = by_group(x.q, groups).mul(x.scale), by_group(x.k_cmp)[:, :, 0]
        lse = None if x.lse is None else by_group(x.lse[..., None], groups)[..., 0]
        index = torch.full((batch * groups, queries, x.spec.select_top), -1, device=q.device)
        documents = document_slices(queries, x.cu_seqlens)
        blocks = compressed_slices(x.seq_len, x.cu_seqlens, x.spec)
        for rows, run in zip(documents, blocks, strict=True):
            length = x.seq_len if x.cu_seqlens is None else rows.stop - rows.start
            for heads in head_slices(batch * groups):
                of_rows = None if lse is None else lse[heads, rows]
                inputs = q[heads, rows], k[heads, run], of_rows
                _fill_index(*inputs, x.spec, length, index[heads, rows])
        index = index.unflatten(0, (batch, groups)).transpose(1, 2)
        return index.to(torch.int32).contiguous()


def _fill_index(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, spec: NSASpec, seq_len: int, index: Tensor
) -> None:
    """Fill `index` [K, T, n] for K of the KV heads and one document."""
    heads, queries, group = q.shape[:3]
    step = queries_per_tile(heads, group)
    blocks, weights = overlap_table(seq_len, spec, q.dtype, q.device)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = seq_len - queries + start
        position = torch.arange(first, first + stop - start, device=q.device)[:, None]
        own = position // spec.select_len
        candidates = spec.select_blocks_len(first + stop - start)
        block = torch.arange(candidates, device=q.device)
        if candidates <= spec.select_top:
            index[:, start:stop, :candidates] = torch.where(block <= own, block, -1)
            continue
        seen = spec.visible_compressed(first + stop - start - 1)
        score = q[:, start:stop].flatten(1, 2) @ k_cmp[:, :seen].mT
        end = torch.arange(seen, device=q.device) * spec.block_stride + spec.block_len - 1
        table = blocks[:, :candidates], weights[:, :candidates]
        if lse is None:
            importance = log_sum_overlaps(score.masked_fill_(end > position, -torch.inf), *table)
        else:
            p = score.sub_(lse[:, start:stop].flatten(1)[..., None]).exp_()
            p = p.unflatten(1, (-1, group)).sum(2)  # [K, R, N]
            importance = sum_overlaps(p.masked_fill_(end > position, 0), *table)
        index[:, start:stop] = top_blocks(importance, own, spec)


def sum_overlaps(p: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    """Importance [.., M] from probabilities [.., N] of compressed blocks and an overlap table."""
    padded = torch.nn.functional.pad(p, (0, 1))  # indices past the last block read this 0
    total = p.new_zeros(*p.shape[:-1], blocks.shape[1])
    for index, weight in zip(blocks, weights, strict=True):  # in a fixed order: ties stay exact
        total += padded.index_select(-1, index.clamp(max=p.shape[-1])) * weight
    return total


def log_sum_overlaps(score: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    """The logarithm of `sum_overlaps` of exp(score), which cannot overflow."""
    padded = torch.nn.functional.pad(score, (0, 1), value=-torch.inf)
    total = score.new_full((*score.shape[:-1], blocks.shape[1]), -torch.inf)
    for index, weight in zip(blocks, weights, strict=True):
        part = padded.index_select(-1, index.clamp(max=score.shape[-1])) + weight.log()
        total = part if len(blocks) == 1 else torch.logaddexp(total, part)
    return total


def top_blocks(importance: Tensor, own: Tensor, spec: NSASpec) -> Tensor:
    """The top n blocks per row of `importance` [K, R, M] with M > n, ascending, padded with -1.

    `topk` may return either of two equal scores, so it only provides the n-th score: blocks above
    it are selected, then the lowest indices among blocks equal to it.
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
    """The c compressed blocks that overlap each selection block, and overlap/d: both [c, M]."""
    length, stride, size = spec.block_len, spec.block_stride, spec.select_len
    first = torch.arange(spec.select_blocks_len(seq_len), device=device) * size
    low = torch.div(first - length, stride, rounding_mode="floor") + 1
    block = low + torch.arange(spec.max_overlaps, device=device)[:, None]
    start = block * stride
    shared = torch.minimum(start + length, first + size) - torch.maximum(start, first)
    valid = (block >= 0) & (block < spec.compressed_len(seq_len))
    weight = torch.where(valid, shared.clamp(min=0), 0).to(dtype) / stride
    return block.clamp(min=0), weight


blockwise_select_blocks = register(
    "nsa::blockwise_select_blocks", SelectionInputs, _select, fake=SelectionInputs.empty_index
)


def attention(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    """One branch's attention: (o, lse)."""
    return blockwise_attention(*x[:6], x.spec.to_ints(), x.scale)


def select_blocks(x: SelectionInputs) -> Tensor:
    """The blocks that each query selects, ascending, padded with -1: int32 [B, T, K, n]."""
    q, k_cmp, lse, cu_seqlens, spec, seq_len, scale = x
    return blockwise_select_blocks(q, k_cmp, lse, cu_seqlens, spec.to_ints(), seq_len, scale)
