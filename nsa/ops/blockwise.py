"""Native Sparse Attention in plain PyTorch, tile by tile: any device, memory linear in T.

Five layers: the loops over tiles (`tiles.py`), the walk over batch, documents and KV heads, the
custom ops with their autograd, and at the end the functions that every backend has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nsa.ops.documents import compressed_slices, document_slices
from nsa.ops.tiles import (
    HEADS,
    Tile,
    attend,
    attend_backward,
    compressed_tiles,
    selected_tiles,
    tile_step,
    window_tiles,
)
from nsa.spec import NSASpec


def _walk(
    branch: str,
    pattern: list[int],
    heads: _Heads,
    block_index: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], Iterable[Tile]]]:
    """Where some KV heads of each document find their rows and keys, and the tiles between."""
    count, seq_len, group = heads.q.shape[:3]
    documents = document_slices(seq_len, cu_seqlens)
    keys = documents
    if branch == "compressed":
        keys = compressed_slices(seq_len, cu_seqlens, NSASpec(*pattern))
    for rows, run in zip(documents, keys, strict=True):
        length, device = rows.stop - rows.start, heads.q.device
        step = tile_step(min(count, HEADS), group)
        tiles: Iterable[Tile] = []
        if branch == "compressed":
            tiles = compressed_tiles(length, NSASpec(*pattern), step, device)
        elif branch == "window":
            tiles = window_tiles(length, pattern[0], step, device)
        for some in head_slices(count):
            if block_index is not None:
                tiles = selected_tiles(block_index[some, rows], NSASpec(*pattern), group)
            yield (some, rows), (some, run), tiles


def head_slices(count: int) -> list[slice]:
    """The KV heads, a few at a time."""
    return [slice(start, start + HEADS) for start in range(0, count, HEADS)]


@dataclass
class _Heads:
    """Inputs by KV head (of every sequence), in the dtype of sums; the scale is folded into q."""

    q: Tensor  # [K, T, G, Dk]
    k: Tensor  # [K, N, Dk]
    v: Tensor  # [K, N, Dv]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, scale: float) -> _Heads:
        return cls(by_group(q, k.shape[2]).mul(scale), by_group(k)[:, :, 0], by_group(v)[:, :, 0])


def by_group(x_BTHD: Tensor, groups: int | None = None) -> Tensor:
    """[B, T, H, D] to contiguous [B*K, T, G, D] in float32, or float64 where it was."""
    dtype = torch.float64 if x_BTHD.dtype == torch.float64 else torch.float32
    x = x_BTHD.unflatten(2, (groups or x_BTHD.shape[2], -1)).permute(0, 2, 1, 3, 4)
    return x.to(dtype).contiguous().flatten(0, 1)


def by_token(x_KTGD: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """The way back: [B*K, T, G, D] to contiguous [B, T, H, D]."""
    x = x_KTGD.unflatten(0, (batch, -1)).permute(0, 2, 1, 3, 4)
    return x.flatten(2, 3).to(dtype).contiguous()


def _by_head(block_index_BTKn: Tensor | None) -> Tensor | None:
    if block_index_BTKn is None:
        return None
    return block_index_BTKn.transpose(1, 2).flatten(0, 1)


@torch.library.custom_op("nsa::blockwise_attention", mutates_args=())
def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor | None,
    cu_seqlens: Tensor | None,
    branch: str,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One branch's (o, lse). `pattern` holds the spec's seven numbers; the window alone for it."""
    with torch.autocast(q.device.type, enabled=False):
        heads = _Heads.of(q, k, v, scale)
        o = heads.q.new_zeros(*heads.q.shape[:3], v.shape[-1])
        lse = heads.q.new_full(heads.q.shape[:3], -torch.inf)
        index = _by_head(block_index)
        for rows, run, tiles in _walk(branch, pattern, heads, index, cu_seqlens):
            attend(heads.q[rows], heads.k[run], heads.v[run], tiles, o[rows], lse[rows])
        batch = q.shape[0]
        return by_token(o, batch, q.dtype), by_token(lse[..., None], batch, lse.dtype)[..., 0]


@blockwise_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor | None,
    cu_seqlens: Tensor | None,
    branch: str,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op("nsa::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    block_index: Tensor | None,
    cu_seqlens: Tensor | None,
    branch: str,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of one branch, from the same tiles as the forward pass."""
    with torch.autocast(q.device.type, enabled=False):
        heads = _Heads.of(q, k, v, scale)
        groups = k.shape[2]
        lse = by_group(lse[..., None], groups)
        blind = lse == -torch.inf
        do = by_group(do, groups).masked_fill(blind, 0)
        delta = (do * by_group(o, groups)).sum(-1, keepdim=True) - by_group(dlse[..., None], groups)
        delta = delta.masked_fill(blind, 0)
        grads = [torch.zeros_like(x) for x in (heads.q, heads.k, heads.v)]
        index = _by_head(block_index)
        for rows, run, tiles in _walk(branch, pattern, heads, index, cu_seqlens):
            attend_backward(
                (do[rows], delta[rows][..., 0], lse[rows][..., 0]),
                (heads.q[rows], heads.k[run], heads.v[run]),
                tiles,
                (grads[0][rows], grads[1][run], grads[2][run]),
            )
        dq, dk, dv = grads[0].mul_(scale), grads[1][:, :, None], grads[2][:, :, None]
        batch = q.shape[0]
        return (
            by_token(dq, batch, q.dtype),
            by_token(dk, batch, k.dtype),
            by_token(dv, batch, v.dtype),
        )


@blockwise_attention_backward.register_fake
def _(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, block_index, cu_seqlens, *ctx.static = inputs
    ctx.save_for_backward(q, k, v, *output, block_index, cu_seqlens)


def _backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    grads = blockwise_attention_backward(do, dlse, *ctx.saved_tensors, *ctx.static)
    return *grads, None, None, None, None, None


blockwise_attention.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("nsa::blockwise_select_blocks", mutates_args=())
def blockwise_select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    seq_len: int,
    scale: float,
) -> Tensor:
    """The blocks that each query attends to, int32 [B, T, K, n]."""
    spec, groups = NSASpec(*pattern), k_cmp.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        heads = _Heads.of(q, k_cmp, k_cmp, scale)
        lse = by_group(lse[..., None], groups)[..., 0]
        batch, queries = q.shape[:2]
        index = torch.full((batch * groups, queries, spec.select_top), -1, device=q.device)
        documents = document_slices(queries, cu_seqlens)
        blocks = compressed_slices(seq_len, cu_seqlens, spec)
        for rows, run in zip(documents, blocks, strict=True):
            length = seq_len if cu_seqlens is None else rows.stop - rows.start
            for some in head_slices(batch * groups):
                q_some, lse_some = heads.q[some, rows], lse[some, rows]
                _select(q_some, heads.k[some, run], lse_some, spec, length, index[some, rows])
        index = index.unflatten(0, (batch, groups)).transpose(1, 2)
        return index.to(torch.int32).contiguous()


@blockwise_select_blocks.register_fake
def _(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    seq_len: int,
    scale: float,
) -> Tensor:
    return q.new_empty(*q.shape[:2], k_cmp.shape[2], pattern[3], dtype=torch.int32)


def _select(
    q: Tensor, k_cmp: Tensor, lse: Tensor, spec: NSASpec, seq_len: int, index: Tensor
) -> None:
    """Fill `index` [K, T, n] for some KV heads of one document; the queries are its last ones."""
    heads, queries, group = q.shape[:3]
    step = tile_step(heads, group)
    blocks, weights = fold(seq_len, spec, q.dtype, q.device)
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
        p = score.sub_(lse[:, start:stop].flatten(1)[..., None]).exp_()
        p = p.unflatten(1, (-1, group)).sum(2)
        end = torch.arange(seen, device=q.device) * spec.block_stride + spec.block_len - 1
        p = torch.nn.functional.pad(p.masked_fill_(end > position, 0), (0, 1))
        importance = p.new_zeros(heads, stop - start, candidates)
        for near, weight in zip(blocks, weights, strict=True):  # in order: ties stay exact
            column = near[:candidates].clamp(max=seen)  # column `seen` holds the 0 of unseen blocks
            importance += p.index_select(-1, column) * weight[:candidates]
        index[:, start:stop] = top_blocks(importance, own, spec)


def top_blocks(importance: Tensor, own: Tensor, spec: NSASpec) -> Tensor:
    """The n blocks of each row of `importance` [K, R, M], M > n, ascending and padded with -1.

    `topk` alone may take either of two equal scores, so it only finds the n-th score; what lies
    above it is in, and what equals it is taken from the lowest index on.
    """
    block = torch.arange(importance.shape[-1], device=importance.device)
    always = (block < spec.init_blocks) | (block > own - spec.local_blocks)
    score = importance.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
    least = score.topk(spec.select_top, -1).values[..., -1:]
    above, equal = score > least, score == least
    room = spec.select_top - above.sum(-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(-1) <= room))) & (block <= own)
    index = torch.where(chosen, block, importance.shape[-1])
    index = index.topk(spec.select_top, -1, largest=False).values.sort(-1).values
    return torch.where(index < importance.shape[-1], index, -1)


@lru_cache(maxsize=16)
def fold(
    seq_len: int, spec: NSASpec, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For each selection block, the compressed blocks that touch it and overlap/d: both [c, M]."""
    length, stride, size = spec.block_len, spec.block_stride, spec.select_len
    first = torch.arange(spec.select_blocks_len(seq_len), device=device) * size
    low = torch.div(first - length, stride, rounding_mode="floor") + 1
    block = low + torch.arange(spec.touching, device=device)[:, None]
    start = block * stride
    shared = torch.minimum(start + length, first + size) - torch.maximum(start, first)
    valid = (block >= 0) & (block < spec.compressed_len(seq_len))
    weight = torch.where(valid, shared.clamp(min=0), 0).to(dtype) / stride
    return block.clamp(min=0), weight


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    spec: NSASpec,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each query over the compressed keys of blocks that end at or before it; (o, lse)."""
    return blockwise_attention(
        q, k_cmp, v_cmp, None, cu_seqlens, "compressed", list(astuple(spec)), scale
    )


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    *,
    seq_len: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The blocks that each query attends to, ascending, padded with -1: int32 [B, T, K, n]."""
    return blockwise_select_blocks(q, k_cmp, lse, cu_seqlens, list(astuple(spec)), seq_len, scale)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor,
    spec: NSASpec,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Each query over the positions at or before it inside its chosen blocks."""
    pattern = list(astuple(spec))
    return blockwise_attention(q, k, v, block_index, cu_seqlens, "selected", pattern, scale)[0]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Each query over the last `window` positions, its own included."""
    return blockwise_attention(q, k, v, None, cu_seqlens, "window", [window], scale)[0]
