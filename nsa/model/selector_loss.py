"""Selector loss: trains compressed keys to rank blocks as the selected branch would attend to them.

The selection of blocks has no gradient. With separate keys per branch, compressed keys learn which
blocks matter only from the compressed branch's own output, which is slow and often fails. This loss
compares two distributions over selection blocks, at some queries of each sequence:

    target[j]   attention that block j would get from the selected branch's keys, without selection
    p[j]        attention that it gets from the compressed keys, as `select_blocks` ranks it
    loss        mean over queries of Σ_j target[j] · log(target[j] / p[j])

j runs over the blocks that are not always selected. Inside the logarithm, target and p are
normalized over these blocks; the factor before it is not, so a query weighs as much as its
attention to them. Only compressed keys get a gradient; the attention layer passes keys of detached
hidden states. Few queries are enough: the noise averages out over steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.spec import NSASpec

QUERIES = 32  # compared in each sequence, at least, if it has them


def sampled_queries(seq_len: int, offset: Tensor) -> Tensor:
    """Return evenly spaced tokens [S]; `offset`, any 0-dim integer, decides where they begin."""
    stride = max(1, seq_len // QUERIES)
    return torch.arange(0, seq_len - stride + 1, stride, device=offset.device) + offset % stride


def selector_loss(
    q: Tensor,
    k_cmp: Tensor,
    k_sel: Tensor,
    spec: NSASpec,
    queries: Tensor,
    position: Tensor,
    block_tokens: Tensor,
) -> Tensor:
    """Return the loss, 0-dim in at least float32.

    q [B, T, Hq, D], k_cmp [B, N, Hkv, D], k_sel [B, T, Hkv, D]; `queries` [S]: the compared tokens;
    `position` [T]: each token's position in its document; `block_tokens` [N, l]: the tokens of each
    compressed block.
    """
    at = position[queries]  # [S]
    start = queries - at  # of the queries' documents
    q = q.detach()[:, queries].unflatten(2, (k_cmp.shape[2], -1))  # [B, S, K, G, D]
    blocks = torch.arange(spec.select_blocks_len(len(position)), device=q.device)  # [M]
    last = at // spec.select_len - spec.local_blocks
    free = ((blocks >= spec.init_blocks) & (blocks <= last[:, None]))[:, None]  # [S, 1, M]

    with torch.no_grad():
        offset = torch.arange(len(blocks) * spec.select_len, device=q.device)  # in the document
        tokens = (start[:, None] + offset).clamp(max=len(position) - 1)[:, None, None]
        score = _scores(q, k_sel)  # [B, S, K, G, T]
        score = score.gather(-1, tokens.expand(*score.shape[:-1], -1))
        attention = _mean_attention(score, offset <= at[:, None])  # [B, S, K, M · l']
        target = attention.unflatten(-1, (-1, spec.select_len)).sum(-1) * free
        fraction = _normalized(target)

    first, end = block_tokens[:, 0], block_tokens[:, -1]
    seen = (end <= queries[:, None]) & (first >= start[:, None])  # [S, N]
    block = position[block_tokens] // spec.select_len  # [N, l]
    overlap = target.new_zeros(len(block), len(blocks))
    overlap = overlap.scatter_add(1, block, torch.ones_like(block, dtype=target.dtype))  # [N, M]
    p = _mean_attention(_scores(q, k_cmp), seen)  # [B, S, K, N]
    p = _normalized(p @ overlap * free)
    tiny = torch.finfo(p.dtype).tiny
    divergence = target * (fraction.clamp(min=tiny).log() - p.clamp(min=tiny).log())
    return divergence.sum(-1).mean()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled products of q [B, S, K, G, D] and k [B, N, K, D], [B, S, K, G, N]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.einsum("bskgd,bnkd->bskgn", q.to(dtype), k.to(dtype)) * q.shape[-1] ** -0.5


def _mean_attention(score: Tensor, seen: Tensor) -> Tensor:
    """Softmax of score [B, S, K, G, N] over what is `seen` [S, N], mean over G; 0 if nothing is."""
    seen, any_seen = seen[:, None, None], seen.any(-1)[:, None, None, None]
    # Without this the gradient of a softmax over nothing would be NaN.
    score = score.masked_fill(~seen, -torch.inf).where(any_seen, 0.0)
    return (score.softmax(-1) * any_seen).mean(3)


def _normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
