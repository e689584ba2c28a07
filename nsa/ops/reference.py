"""Reference backend: the definition of Native Sparse Attention, which every other is held to.

Dense and short rather than fast: it builds each branch's mask and calls one softmax.
Sizes in names: B batch, T queries, N keys, H query heads, K key/value heads, M selection blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.documents import compressed_slices, document_slices
from nsa.spec import NSASpec


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, spec: NSASpec, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over the compressed keys of blocks that end at or before each query; (o, lse)."""
    parts = []
    documents = document_slices(q.shape[1], cu_seqlens)
    blocks = compressed_slices(q.shape[1], cu_seqlens, spec)
    for doc, cmp in zip(documents, blocks, strict=True):
        seen = visible_blocks(doc.stop - doc.start, spec, q.device)
        parts.append(_attend(q[:, doc], k_cmp[:, cmp], v_cmp[:, cmp], seen, scale))
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    seq_len: int,
    scale: float,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The blocks that each query attends to, ascending, padded with -1: int32 [B, T, K, n]."""
    parts = []
    documents = document_slices(q.shape[1], cu_seqlens)
    blocks = compressed_slices(seq_len, cu_seqlens, spec)
    for doc, cmp in zip(documents, blocks, strict=True):
        length = seq_len if cu_seqlens is None else doc.stop - doc.start
        score = importance(q[:, doc], k_cmp[:, cmp], lse[:, doc], spec, seq_len=length, scale=scale)
        parts.append(top_blocks(score, spec, seq_len=length))
    return torch.cat(parts, 1)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor,
    spec: NSASpec,
    scale: float,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Attention over the positions at or before each query inside its selected blocks."""
    parts = []
    for doc in document_slices(q.shape[1], cu_seqlens):
        position = torch.arange(doc.stop - doc.start, device=q.device)
        block = position // spec.select_len
        selected = (block_index[:, doc, :, :, None] == block).any(3)  # [B, T, K, N]
        seen = selected & (position <= position[:, None])[None, :, None]
        parts.append(_attend(q[:, doc], k[:, doc], v[:, doc], seen, scale)[0])
    return torch.cat(parts, 1)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """Attention over the last `window` positions, the query's own included."""
    parts = []
    for doc in document_slices(q.shape[1], cu_seqlens):
        position = torch.arange(doc.stop - doc.start, device=q.device)
        distance = position[:, None] - position
        seen = ((distance >= 0) & (distance < window))[None, :, None]
        parts.append(_attend(q[:, doc], k[:, doc], v[:, doc], seen, scale)[0])
    return torch.cat(parts, 1)


def visible_blocks(
    seq_len: int, spec: NSASpec, device: torch.device | None = None, queries: int | None = None
) -> Tensor:
    """Which compressed blocks end at or before each of the last `queries`: bool [1, T, 1, N]."""
    queries = seq_len if queries is None else queries
    position = torch.arange(seq_len - queries, seq_len, device=device)
    start = torch.arange(spec.compressed_len(seq_len), device=device) * spec.block_stride
    return (start + spec.block_len - 1 <= position[:, None])[None, :, None]


def overlap(seq_len: int, spec: NSASpec, device: torch.device | None = None) -> Tensor:
    """overlap(i, j)/d: the positions that compressed and selection block share, [N, M]."""
    start = torch.arange(spec.compressed_len(seq_len), device=device)[:, None] * spec.block_stride
    block = torch.arange(spec.select_blocks_len(seq_len), device=device) * spec.select_len
    last = torch.minimum(start + spec.block_len, block + spec.select_len)
    return (last - torch.maximum(start, block)).clamp(min=0).double() / spec.block_stride


def importance(
    q: Tensor, k_cmp: Tensor, lse: Tensor, spec: NSASpec, *, seq_len: int, scale: float
) -> Tensor:
    """How much each query's KV group attends to each selection block of a document: [B, T, K, M].

    The queries are the document's last ones. Block i's probability in the compressed softmax is
    divided among the selection blocks that i overlaps, and summed over the group's heads.
    """
    dtype = _accumulator(q)
    groups, queries = k_cmp.shape[2], q.shape[1]
    q = q.to(dtype).unflatten(2, (groups, -1))
    score = torch.einsum("btkgd,bnkd->btkgn", q, k_cmp.to(dtype)) * scale
    seen = visible_blocks(seq_len, spec, q.device, queries)[:, :, :, None]
    shifted = score - lse.to(dtype).unflatten(2, (groups, -1))[..., None]
    p = torch.where(seen, shifted, -torch.inf).exp().sum(3)  # [B, T, K, N]
    weight = overlap(seq_len, spec, q.device).to(dtype)
    total = p.new_zeros(*p.shape[:3], weight.shape[1])
    # One compressed block after the other, so that selection blocks which the same ones overlap
    # in the same measure come out equal to the last bit: ties are ties.
    for i in range(len(weight)):
        total += p[..., i : i + 1] * weight[i]
    return total


def top_blocks(score: Tensor, spec: NSASpec, *, seq_len: int) -> Tensor:
    """The n blocks of highest `score` [B, T, K, M], among them those that are always selected."""
    queries, blocks = score.shape[1], score.shape[-1]
    position = torch.arange(seq_len - queries, seq_len, device=score.device)
    own = (position // spec.select_len)[:, None, None]
    block = torch.arange(blocks, device=score.device)
    candidate = block <= own
    always = (block < spec.init_blocks) | (block > own - spec.local_blocks)
    ranked = torch.where(always & candidate, torch.inf, score).masked_fill(~candidate, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : spec.select_top]
    index = torch.where(order <= own, order, blocks).sort(-1).values
    index = torch.where(index < blocks, index, -1).to(torch.int32)
    return torch.nn.functional.pad(index, (0, spec.select_top - index.shape[-1]), value=-1)


def _accumulator(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention where `seen` [B or 1, T, K or 1, N]; nothing seen gives 0 and lse -inf."""
    dtype = _accumulator(q)
    groups = k.shape[2]
    grouped = q.to(dtype).unflatten(2, (groups, q.shape[2] // groups))
    score = torch.einsum("btkgd,bnkd->btkgn", grouped, k.to(dtype)) * scale
    seen = seen[:, :, :, None]
    not_blind = seen.any(-1, keepdim=True)
    # A row that sees nothing is zero before the softmax and masked after it, so that its gradient
    # is 0 and not NaN.
    score = torch.where(not_blind, torch.where(seen, score, -torch.inf), 0.0)
    lse = torch.where(not_blind[..., 0], score.logsumexp(-1), -torch.inf)
    p = torch.where(not_blind, score.softmax(-1), 0.0) if k.shape[1] else score
    o = torch.einsum("btkgn,bnkd->btkgd", p, v.to(dtype))
    return o.flatten(2, 3).to(q.dtype), lse.flatten(2, 3)
