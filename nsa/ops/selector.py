"""Selector loss: trains compressed keys to rank blocks by the selected branch's attention.

    target[j]   attention to block j by the selected branch's keys, if all tokens were selected
    p[j]        attention to block j by the compressed keys, by which `select_blocks` ranks it
    loss        mean over queries of Σ_j target[j] · log(target[j] / p[j])

j runs over the ranked blocks: those before the query that are not always selected. In the
logarithm, target and p are normalized to a sum of 1 over the ranked blocks. The factor target[j] is
not normalized, so a query counts by how much it attends to ranked blocks. target and p are means
over the query heads of a KV head; with an index, p is the mean over the heads of its queries,
`q_cmp`. Only the compressed keys and `q_cmp` get a gradient.

The forward pass returns what the backward pass needs: dp[j] = ∂loss/∂p[j] of each query and block;
for each query and head, the lse of the compressed scores, and Σ_j dp[j] · (this head's p[j]). The
backward pass computes the compressed scores again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.ops import triton
from nsa.ops.backend import dispatch
from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import (
    SelectorLossInputs,
    block_starts,
    check_compressed,
    check_documents,
    check_heads,
    check_length,
    check_scale,
    repeat_per_document,
)
from nsa.spec import NSASpec

SCORES = 2**24  # about how many scores the PyTorch implementation holds at a time
TINY = torch.finfo(torch.float32).tiny  # least argument of a logarithm, in every dtype


def selector_loss(
    q: Tensor,
    k_cmp: Tensor,
    k_sel: Tensor,
    queries: Tensor,
    spec: NSASpec,
    *,
    q_cmp: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the loss, 0-dim, and the target of each block [B, Hkv, S, M], 0 if not ranked.

    `queries` int64 [S] are the tokens, ascending, whose queries count. M blocks cover T tokens; in
    packed documents, block j is the j-th of the query's document. `q_cmp` [B, T, heads, Dk] ranks
    blocks instead of q. Results are float32 (float64 for float64 inputs). The backends "blockwise"
    and "reference" both run the PyTorch code in this file.
    """
    check_heads(q, k_cmp=k_cmp, k_sel=k_sel)
    check_length("k_sel", k_sel, q.shape[1], "q")
    check_documents(cu_seqlens, q)
    check_compressed(k_cmp, q.shape[1], spec, cu_seqlens)
    if queries.dim() != 1 or queries.dtype != torch.int64 or len(queries) < 1:
        raise ValueError(
            f"queries is {queries.dtype} {tuple(queries.shape)}; it must be int64 [S], ascending"
        )
    if q_cmp is not None:
        check_heads(q_cmp, k_cmp=k_cmp)
        check_length("q_cmp", q_cmp, q.shape[1], "q")
    tensors = k_cmp, q_cmp, q.detach(), k_sel.detach(), queries.contiguous(), cu_seqlens
    op = torch_selector_loss
    if dispatch(backend, "selector_loss", q) is triton:
        from nsa.ops.triton.selector_loss import triton_selector_loss as op
    loss, target, *_ = op(SelectorLossInputs(*tensors, spec, check_scale(q, scale)))
    return loss, target


def _forward(x: SelectorLossInputs) -> tuple[Tensor, ...]:
    _, target, dp, by_head = x.empty_outputs()
    total = target.new_zeros(())
    position, token_block, cmp_starts = _tables(x)
    number = torch.arange(target.shape[-1], device=token_block.device)  # [M]
    token = torch.arange(len(position), device=token_block.device)  # [T]
    overlap = _overlap(x, token_block, cmp_starts, len(number), target.dtype)
    for part in _parts(x):
        t = x.queries[part][:, None]  # [s, 1]
        doc_start = t - position[t]
        hidden = (token > t) | (token < doc_start)  # [s, T]
        score = _scores(x.q[:, x.queries[part]], x.k_sel, x.scale)
        score = score.masked_fill_(hidden[:, None], -torch.inf)
        attention = score.softmax(-1).mean(3)  # [B, K, s, T]
        by_block = attention.new_zeros(*attention.shape[:3], len(number))
        by_block.index_add_(3, token_block, attention)
        ranked = (number >= x.spec.init_blocks) & (number <= token_block[t] - x.spec.local_blocks)
        target_part = by_block * ranked  # [B, K, s, M]
        score, lse = _compressed_scores(x, t, doc_start, cmp_starts)
        p_head = (score - lse[..., None]).exp_() @ overlap  # [B, K, s, G, M]
        p = p_head.mean(3) * ranked
        target_sum, p_sum = target_part.sum(-1, keepdim=True), p.sum(-1, keepdim=True)
        log_ratio = (_log(target_part) - _log(target_sum)) - (_log(p) - _log(p_sum))
        total += (target_part * log_ratio).sum()
        # The gradient through log(p_sum), and through log(p); 0 where the logarithm is clamped.
        dp_part = (target_sum / p_sum).where(p_sum > TINY, 0) - (target_part / p).where(p > TINY, 0)
        target[:, :, part] = target_part
        dp[:, :, part] = dp_part * ranked
        by_head[0, :, :, part] = lse
        by_head[1, :, :, part] = (p_head * dp[:, :, part, None]).sum(-1)
    queries = target[..., 0].numel()  # of all sequences and KV heads
    return total / queries, target, dp, by_head


def _backward(
    dloss: Tensor, x: SelectorLossInputs, dp: Tensor, by_head: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k_cmp and of q_cmp; the second is empty without q_cmp."""
    position, token_block, cmp_starts = _tables(x)
    overlap = _overlap(x, token_block, cmp_starts, dp.shape[-1], dp.dtype)
    k = x.k_cmp.to(dp.dtype)
    dk = torch.zeros_like(k)
    dq = k.new_zeros(0 if x.q_cmp is None else x.q_cmp.shape)
    for part in _parts(x):
        t = x.queries[part][:, None]  # [s, 1]
        score, _ = _compressed_scores(x, t, t - position[t], cmp_starts)  # [B, K, s, G, N]
        lse, dp_p = (y[..., None] for y in by_head[:, :, :, part])  # [B, K, s, G, 1]
        ds = (score - lse).exp_() * ((dp[:, :, part, None] @ overlap.T) - dp_p)
        q_scaled = _scaled_by_kv_head(x.ranking[:, t[:, 0]], k, x.scale)
        dk += torch.einsum("bksgn,bksgd->bnkd", ds, q_scaled)
        if x.q_cmp is not None:
            dq[:, t[:, 0]] = torch.einsum("bksgn,bnkd->bskgd", ds, k).flatten(2, 3) * x.scale
    factor = dloss / by_head[0].numel()  # the loss and p are means, over queries and over heads
    return (dk * factor).to(x.k_cmp.dtype), (dq * factor).to(x.k_cmp.dtype)


def _parts(x: SelectorLossInputs) -> Iterator[slice]:
    """Yield slices of `queries` with about SCORES scores each."""
    batch, seq_len, heads, _ = x.q.shape
    step = max(1, SCORES // (batch * heads * seq_len))
    return (slice(begin, begin + step) for begin in range(0, len(x.queries), step))


def _tables(x: SelectorLossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's position and block in its document [T], compressed blocks' starts [N]."""
    seq_len, device = x.k_sel.shape[1], x.q.device
    position = torch.arange(seq_len, device=device)
    if x.cu_seqlens is not None:
        position = position - repeat_per_document(x.cu_seqlens[:-1], x.cu_seqlens, seq_len)
    cmp_starts = block_starts(seq_len, x.cu_seqlens, x.spec, device)
    return position, position // x.spec.select_len, cmp_starts


def _overlap(
    x: SelectorLossInputs, token_block: Tensor, cmp_starts: Tensor, blocks: int, dtype: torch.dtype
) -> Tensor:
    """Return which fraction of each compressed block is in each selection block, [N, M]."""
    token = cmp_starts[:, None] + torch.arange(x.spec.block_len, device=cmp_starts.device)  # [N, l]
    fraction = torch.full_like(token, 1 / x.spec.block_len, dtype=dtype)
    return fraction.new_zeros(len(cmp_starts), blocks).scatter_add_(1, token_block[token], fraction)


def _log(x: Tensor) -> Tensor:
    return x.clamp(min=TINY).log()


def _compressed_scores(
    x: SelectorLossInputs, t: Tensor, doc_start: Tensor, cmp_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return scores, -inf where hidden, and lse, +inf if all are hidden: then p = 0."""
    seen = (cmp_starts + x.spec.block_len <= t + 1) & (cmp_starts >= doc_start)  # [s, N]
    score = _scores(x.ranking[:, t[:, 0]], x.k_cmp, x.scale)
    score = score.masked_fill_(~seen[:, None], -torch.inf)
    lse = score.logsumexp(-1)
    return score, lse.masked_fill(lse == -torch.inf, torch.inf)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scaled products of queries [B, s, H, D] and keys [B, N, K, D]: [B, K, s, G, N]."""
    q = _scaled_by_kv_head(q, k, scale)
    return (q.flatten(2, 3) @ k.to(q.dtype).permute(0, 2, 3, 1)).unflatten(2, q.shape[2:4])


def _scaled_by_kv_head(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scaled queries [B, s, H, D] as [B, K, s, G, D], in at least float32."""
    q = q.unflatten(2, (k.shape[2], -1)).transpose(1, 2)
    return q.to(torch.promote_types(q.dtype, torch.float32)) * scale


torch_selector_loss = register(
    "nsa::selector_loss",
    SelectorLossInputs,
    _forward,
    SelectorLossInputs.empty_outputs,
    outputs=4,
    gradient=Gradient(_backward, inputs=2, outputs=1, saved=slice(2, 4)),
)
