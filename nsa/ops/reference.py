"""Reference backend: the definition of Native Sparse Attention, which other backends must match.

Dense and short rather than fast: it builds each branch's mask and calls one softmax.
Sizes in names: B batch, T queries, N keys, H query heads, K key/value heads, M selection blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.inputs import AttentionInputs, SelectionInputs, compressed_slices, document_slices
from nsa.spec import NSASpec


def attention(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return one branch's attention, (o, lse)."""
    parts = []
    documents = document_slices(x.q.shape[1], x.cu_seqlens)
    keys = documents
    if x.branch == "compressed":
        keys = compressed_slices(x.q.shape[1], x.cu_seqlens, x.spec)
    for doc, doc_keys in zip(documents, keys, strict=True):
        seen = _visible(x, doc)
        parts.append(_attend(x.q[:, doc], x.k[:, doc_keys], x.v[:, doc_keys], seen, x.scale))
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _visible(x: AttentionInputs, doc: slice) -> Tensor:
    """Return which keys each query of a document sees: bool [B or 1, T, K or 1, N]."""
    length = doc.stop - doc.start
    if x.branch == "compressed":
        return visible_blocks(length, length, x.spec, x.q.device)
    position = torch.arange(length, device=x.q.device)
    distance = position[:, None] - position
    if x.block_index is None:
        return ((distance >= 0) & (distance < x.spec.window))[None, :, None]
    block = position // x.spec.select_len
    selected = (x.block_index[:, doc, :, :, None] == block).any(3)  # [B, T, K, N]
    return selected & (distance >= 0)[None, :, None]


def select_blocks(x: SelectionInputs) -> Tensor:
    """Return each query's selected blocks, ascending, padded with -1: int32 [B, T, K, n]."""
    parts = []
    documents = document_slices(x.q.shape[1], x.cu_seqlens)
    blocks = compressed_slices(x.seq_len, x.cu_seqlens, x.spec)
    for doc, cmp in zip(documents, blocks, strict=True):
        length = doc.stop - doc.start if x.cu_seqlens is not None else x.seq_len  # may exceed T
        lse = None if x.lse is None else x.lse[:, doc]
        score = importance(x.q[:, doc], x.k_cmp[:, cmp], lse, x.spec, seq_len=length, scale=x.scale)
        parts.append(top_blocks(score, x.spec, seq_len=length))
    return torch.cat(parts, 1)


def visible_blocks(seq_len: int, queries: int, spec: NSASpec, device: torch.device) -> Tensor:
    """Return which blocks end at or before each of the last `queries` positions: [1, T, 1, N]."""
    position = torch.arange(seq_len - queries, seq_len, device=device)
    start = torch.arange(spec.compressed_len(seq_len), device=device) * spec.block_stride
    return (start + spec.block_len - 1 <= position[:, None])[None, :, None]


def overlap(seq_len: int, spec: NSASpec, device: torch.device) -> Tensor:
    """Return [N, M]: positions that compressed block i and selection block j share, over d."""
    start_i = torch.arange(spec.compressed_len(seq_len), device=device)[:, None] * spec.block_stride
    start_j = torch.arange(spec.select_blocks_len(seq_len), device=device) * spec.select_len
    end = torch.minimum(start_i + spec.block_len, start_j + spec.select_len)
    shared = (end - torch.maximum(start_i, start_j)).clamp(min=0)
    return shared.double() / spec.block_stride


def importance(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, spec: NSASpec, *, seq_len: int, scale: float
) -> Tensor:
    """Return the importance of each selection block to each query and KV head: [B, T, K, M].

    The queries are the document's last positions. The importance of block j is
    Σ p[i] · overlap(i, j)/d over compressed blocks i and the query heads of a KV head, where p is
    the compressed softmax. Without `lse` there is one query head per KV head, and the importance is
    log Σ exp(score[i]) · overlap(i, j)/d, which ranks a query's blocks in the same order.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv_heads, queries = k_cmp.shape[2], q.shape[1]
    q = q.to(dtype).unflatten(2, (kv_heads, -1))
    score = torch.einsum("btkgd,bnkd->btkgn", q, k_cmp.to(dtype)) * scale
    seen = visible_blocks(seq_len, queries, spec, q.device)[:, :, :, None]
    if lse is not None:
        score = score - lse.to(dtype).unflatten(2, (kv_heads, -1))[..., None]
    score = torch.where(seen, score, -torch.inf)
    # [B, T, K, N]: with `lse` p, summed over the query heads of a KV head; without it the score
    terms = score[:, :, :, 0] if lse is None else score.exp().sum(3)
    weight = overlap(seq_len, spec, q.device).to(dtype)  # [N, M]
    block = torch.arange(weight.shape[1], device=q.device)
    total = terms.new_full((*terms.shape[:3], len(block)), -torch.inf if lse is None else 0)
    if not len(weight):
        return total
    # A selection block adds its overlapping compressed blocks one after another, so two selection
    # blocks with the same terms get the same bits: a tie is exact.
    first = (weight > 0).int().argmax(0)  # [M] the first compressed block that overlaps
    for number in range(int((weight > 0).sum(0).max())):  # the most overlaps of a block
        i = (first + number).clamp(max=len(weight) - 1)
        exists = (first + number < len(weight)).to(dtype)  # 0 where `i` was clamped
        part = weight[i, block] * exists
        if lse is None:
            total = torch.logaddexp(total, terms[..., i] + part.log())
        else:
            total += terms[..., i] * part
    return total


def top_blocks(score: Tensor, spec: NSASpec, *, seq_len: int) -> Tensor:
    """Return n blocks, ascending: those always selected, and those of highest `score`."""
    queries, blocks = score.shape[1], score.shape[-1]
    position = torch.arange(seq_len - queries, seq_len, device=score.device)
    own = (position // spec.select_len)[:, None, None]
    block = torch.arange(blocks, device=score.device)
    always = (block < spec.init_blocks) | (block > own - spec.local_blocks)
    ranked = score.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : spec.select_top]
    index = torch.where(order <= own, order, blocks).sort(-1).values  # no candidate: sorted last
    index = torch.where(index < blocks, index, -1).to(torch.int32)
    return torch.nn.functional.pad(index, (0, spec.select_top - index.shape[-1]), value=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention masked by `seen` [B or 1, T, K or 1, N]; no key gives o = 0, lse = -inf."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group_and_queries = q.shape[2] // k.shape[2], q.shape[1]  # G, T
    q_BKGTD = q.to(dtype).unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
    score = q_BKGTD.flatten(2, 3) @ k.to(dtype).permute(0, 2, 3, 1) * scale
    score = score.unflatten(2, group_and_queries)  # [B, K, G, T, N]
    seen = seen.transpose(1, 2)[:, :, None]  # [B or 1, K or 1, 1, T, N]
    blind = ~seen.any(-1, keepdim=True)
    # A softmax over no keys would be NaN, and so would its gradient. So a query without visible
    # keys sees all of them, and its result is set to 0.
    score = score.masked_fill(~(seen | blind), -torch.inf)
    lse = score.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    p = score.softmax(-1).masked_fill(blind, 0.0)
    o = (p.flatten(2, 3) @ v.to(dtype).transpose(1, 2)).unflatten(2, group_and_queries)
    o, lse = (x.movedim(3, 1).flatten(2, 3) for x in (o, lse))  # [B, T, H, D] and [B, T, H]
    return o.to(q.dtype), lse
