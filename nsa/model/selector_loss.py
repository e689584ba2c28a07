"""Selector loss: trains compressed keys to rank blocks by the selected branch's attention.

The selection of blocks has no gradient. With separate keys per branch, compressed keys learn which
blocks matter only from the compressed branch's own output, which is slow and often fails. This loss
compares two distributions over selection blocks, at a sample of queries of each sequence:

    target[j]   attention that block j would get from the selected branch's keys, without selection
    p[j]        attention that it gets from the compressed keys, as `select_blocks` ranks it
    loss        mean over queries of Σ_j target[j] · log(target[j] / p[j])

j runs over the ranked blocks: those before the query that are not always selected. Inside the
logarithm, target and p are normalized to a sum of 1 over them. The first factor is not, so a query
counts by how much it attends to ranked blocks. Only compressed keys get a gradient, and only up to
the hidden states, which the attention layer detaches. A few queries are enough: their noise
averages out over steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.spec import NSASpec

QUERIES = 32  # sampled from each sequence, at least; all queries of a shorter one


def sample_queries(seq_len: int, offset: Tensor) -> Tensor:
    """Return evenly spaced tokens [S]; `offset`, any 0-dim integer, shifts them."""
    stride = max(1, seq_len // QUERIES)
    return torch.arange(0, seq_len - stride + 1, stride, device=offset.device) + offset % stride


@dataclass(frozen=True)
class SampledQueries:
    """The sampled queries [S] and their masks, over N compressed and M selection blocks.

    All layers share them. Selection blocks are those of each query's own document.
    """

    queries: Tensor  # [S] tokens
    keys: Tensor | None  # [S, M · l'] tokens of each query's document; None: there is one document
    causal_mask: Tensor  # [S, M · l'] -inf for keys after the query, else 0
    ranked: Tensor  # [S, M] true for the blocks before the query that are not always selected
    visible: Tensor  # [S, N] true for the compressed blocks that the query sees
    overlap: Tensor  # [N, M] positions that a compressed block and a selection block share

    @classmethod
    def build(
        cls, spec: NSASpec, queries: Tensor, position: Tensor, block_tokens: Tensor, packed: bool
    ) -> SampledQueries:
        """Build the masks from `AttentionMetadata`'s tables.

        `position` [T] of each token in its document; `block_tokens` [N, l] of compressed blocks.
        """
        at = position[queries][:, None]  # [S, 1]
        start = queries[:, None] - at  # first tokens of the queries' documents
        blocks = torch.arange(spec.select_blocks_len(len(position)), device=queries.device)  # [M]
        last = at // spec.select_len - spec.local_blocks
        offset = torch.arange(len(blocks) * spec.select_len, device=queries.device)
        first, end = block_tokens[:, 0], block_tokens[:, -1]
        block = position[block_tokens] // spec.select_len  # [N, l]
        one = torch.ones_like(block, dtype=torch.float32)
        return cls(
            queries,
            keys=(start + offset).clamp(max=len(position) - 1) if packed else None,
            causal_mask=torch.where(offset <= at, 0.0, -torch.inf),
            ranked=(blocks >= spec.init_blocks) & (blocks <= last),
            visible=(end <= queries[:, None]) & (first >= start),
            overlap=one.new_zeros(len(block), len(blocks)).scatter_add(1, block, one),
        )


def selector_loss(
    q: Tensor, k_cmp: Tensor, k_sel: Tensor, spec: NSASpec, sampled: SampledQueries
) -> Tensor:
    """Return the loss, 0-dim in at least float32.

    q [B, T, Hq, D], k_cmp [B, N, Hkv, D], k_sel [B, T, Hkv, D].
    """
    q = q.detach()[:, sampled.queries].unflatten(2, (k_cmp.shape[2], -1)).transpose(1, 2)
    with torch.no_grad():
        score, tokens = _scores(q, k_sel), sampled.causal_mask.shape[1]  # [B, K, S, G, T]
        if sampled.keys is not None:
            keys = sampled.keys[:, None].expand(*score.shape[:-1], tokens)
            score = score.gather(-1, keys)
        elif tokens > score.shape[-1]:
            score = F.pad(score, (0, tokens - score.shape[-1]))
        # In place: these are the largest tensors. No row is all -inf: a query sees itself.
        score.add_(sampled.causal_mask[:, None])
        attention = score.softmax(-1).mean(3)  # [B, K, S, M · l']
        target = attention.unflatten(-1, (-1, spec.select_len)).sum(-1) * sampled.ranked
        log_target = _log_normalized(target)
    score, visible = _scores(q, k_cmp), sampled.visible  # [B, K, S, G, N], [S, N]
    any_visible = visible.any(-1)[:, None, None]
    # Without `where` the gradient of a softmax over nothing would be NaN.
    score = score.masked_fill(~visible[:, None], -torch.inf).where(any_visible, 0.0)
    compressed = (score.softmax(-1) * any_visible).mean(3)  # [B, K, S, N]
    p = compressed @ sampled.overlap.to(score.dtype) * sampled.ranked  # [B, K, S, M]
    return (target * (log_target - _log_normalized(p))).sum(-1).mean()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled products of q [B, K, S, G, D] and k [B, N, K, D], [B, K, S, G, N]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k = k.permute(0, 2, 3, 1).to(dtype, memory_format=torch.contiguous_format)  # [B, K, D, N]
    score = (q.to(dtype) * q.shape[-1] ** -0.5).flatten(2, 3) @ k
    return score.unflatten(2, q.shape[2:4])


def _log_normalized(weights: Tensor) -> Tensor:
    """Return log(weights / their sum), finite where they are 0."""
    tiny = torch.finfo(weights.dtype).tiny
    return weights.clamp(min=tiny).log() - weights.sum(-1, keepdim=True).clamp(min=tiny).log()
