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
    """One branch's attention: (o, lse)."""
    parts = []
    documents = document_slices(x.q.shape[1], x.cu_seqlens)
    keys = documents
    if x.branch == "compressed":
        keys = compressed_slices(x.q.shape[1], x.cu_seqlens, x.spec)
    for rows, cols in zip(documents, keys, strict=True):
        seen = _visible(x, rows)
        parts.append(_attend(x.q[:, rows], x.k[:, cols], x.v[:, cols], seen, x.scale))
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _visible(x: AttentionInputs, rows: slice) -> Tensor:
    """The keys that each query of one document sees in its branch: bool [B or 1, T, K or 1, N]."""
    length = rows.stop - rows.start
    if x.branch == "compressed":
        return visible_blocks(length, x.spec, x.q.device)
    position = torch.arange(length, device=x.q.device)
    distance = position[:, None] - position
    if x.block_index is None:
        return ((distance >= 0) & (distance < x.spec.window))[None, :, None]
    block = position // x.spec.select_len
    selected = (x.block_index[:, rows, :, :, None] == block).any(3)  # [B, T, K, N]
    return selected & (distance >= 0)[None, :, None]


def select_blocks(x: SelectionInputs) -> Tensor:
    """The blocks that each query selects, ascending, padded with -1: int32 [B, T, K, n]."""
    parts = []
    documents = document_slices(x.q.shape[1], x.cu_seqlens)
    blocks = compressed_slices(x.seq_len, x.cu_seqlens, x.spec)
    for doc, cmp in zip(documents, blocks, strict=True):
        length = x.seq_len if x.cu_seqlens is None else doc.stop - doc.start
        lse = None if x.lse is None else x.lse[:, doc]
        score = importance(x.q[:, doc], x.k_cmp[:, cmp], lse, x.spec, seq_len=length, scale=x.scale)
        parts.append(top_blocks(score, x.spec, seq_len=length))
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
    """overlap(i, j)/d, where overlap counts the positions in both blocks: [N, M]."""
    start = torch.arange(spec.compressed_len(seq_len), device=device)[:, None] * spec.block_stride
    block = torch.arange(spec.select_blocks_len(seq_len), device=device) * spec.select_len
    last = torch.minimum(start + spec.block_len, block + spec.select_len)
    return (last - torch.maximum(start, block)).clamp(min=0).double() / spec.block_stride


def importance(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, spec: NSASpec, *, seq_len: int, scale: float
) -> Tensor:
    """Return the importance of each selection block to each query and KV head: [B, T, K, M].

    The queries are the document's last ones. Σ p[i] · overlap(i, j)/d over the compressed blocks i
    and the query heads of a group; p is the compressed softmax. Without `lse`, the logarithm of the
    same sum over exp(score[i]) of the only query head.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups, queries = k_cmp.shape[2], q.shape[1]
    q = q.to(dtype).unflatten(2, (groups, -1))
    score = torch.einsum("btkgd,bnkd->btkgn", q, k_cmp.to(dtype)) * scale
    seen = visible_blocks(seq_len, spec, q.device, queries)[:, :, :, None]
    if lse is not None:
        score = score - lse.to(dtype).unflatten(2, (groups, -1))[..., None]
    score = torch.where(seen, score, -torch.inf)
    p = score[:, :, :, 0] if lse is None else score.exp().sum(3)  # [B, T, K, N]
    weight = overlap(seq_len, spec, q.device).to(dtype)
    blocks = torch.arange(weight.shape[1], device=q.device)
    total = p.new_full((*p.shape[:3], len(blocks)), -torch.inf if lse is None else 0)
    if not len(weight):
        return total
    # Each selection block adds the compressed blocks that overlap it one by one: blocks with equal
    # overlaps then get bitwise equal sums, so ties are exact.
    first = (weight > 0).int().argmax(0)
    for i in range(int((weight > 0).sum(0).max())):
        rows = (first + i).clamp(max=len(weight) - 1)
        inside = (first + i < len(weight)).to(dtype)  # 0 where `rows` was clamped
        part = weight[rows, blocks] * inside
        if lse is None:
            total = torch.logaddexp(total, p[..., rows] + part.log())
        else:
            total += p[..., rows] * part
    return total


def top_blocks(score: Tensor, spec: NSASpec, *, seq_len: int) -> Tensor:
    """The always-selected blocks, then those of highest `score` [B, T, K, M], n in all."""
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


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention masked by `seen` [B or 1, T, K or 1, N]; no key gives o = 0, lse = -inf."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    sizes = q.shape[2] // k.shape[2], q.shape[1]  # G, T
    rows = q.to(dtype).unflatten(2, (-1, sizes[0])).permute(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    score = rows.flatten(2, 3) @ k.to(dtype).permute(0, 2, 3, 1) * scale
    score = score.unflatten(2, sizes)  # [B, K, G, T, N]
    seen = seen.transpose(1, 2)[:, :, None]
    blind = ~seen.any(-1, keepdim=True)
    # A softmax over no keys would be NaN, and so would its gradient. So a row without visible keys
    # sees all of them, and its result is set to 0.
    score = score.masked_fill(~(seen | blind), -torch.inf)
    lse = score.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    p = score.softmax(-1).masked_fill(blind, 0.0)
    o = (p.flatten(2, 3) @ v.to(dtype).transpose(1, 2)).unflatten(2, sizes)
    o, lse = (x.movedim(3, 1).flatten(2, 3) for x in (o, lse))
    return o.to(q.dtype), lse
