"""The selector loss by its definition, differentiated by autograd; cases for its tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.ops import NSASpec, selector_loss
from nsa.ops.inputs import compressed_slices, document_slices
from tests.ops.cases import Case, Inputs, random_cases, with_gradients

TINY = 2.0**-126

RANDOM = [case for case in random_cases(60, longest=90, seed=5) if case.seq_len > 20]
PATTERNS = {
    "recipe's blocks": Case(NSASpec(32, 16, 64, 4, 1, 2, 64), (330,), group=3, key_dim=16),
    "packed": Case(NSASpec(8, 4, 8, 4, 1, 1, 16), (5, 0, 46, 1, 33), group=3),
    "batch": Case(NSASpec(8, 4, 16, 4, 1, 1, 16), (91,), batch=2, kv_heads=1, group=6),
    "odd sizes": Case(NSASpec(9, 7, 5, 4, 0, 1, 5), (80, 40), kv_heads=1, group=4, key_dim=6),
    "large blocks": Case(NSASpec(4, 2, 70, 2, 0, 1, 5), (200,), kv_heads=1, group=1),
    "no compressed block": Case(NSASpec(30, 3, 2, 4, 0, 1, 5), (29,), kv_heads=1),
    "some queries without": Case(NSASpec(30, 3, 2, 4, 0, 1, 5), (60, 29, 40), kv_heads=1),
    "several tiles of documents": Case(NSASpec(4, 2, 4, 4, 0, 1, 5), (1,) * 70 + (60,), group=1),
    "nothing ranked": Case(NSASpec(8, 4, 16, 4, 1, 2, 16), (31,)),
}


def sampled(case: Case) -> Tensor:
    """Every third token, so that tiles of queries are partial and span documents."""
    return torch.arange(case.seq_len % 3, case.seq_len, 3)


def defined_loss(
    q: Tensor,
    k_cmp: Tensor,
    k_sel: Tensor,
    queries: Tensor,
    case: Case,
    q_cmp: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, target), from dense scores of one document and query at a time."""
    spec, groups = case.spec, k_sel.shape[2]
    blocks = torch.arange(spec.select_blocks_len(case.seq_len))
    total, targets = q.new_zeros(()), []
    pieces = [
        (documents, keys)
        for documents, keys in zip(
            document_slices(case.seq_len, case.cu_seqlens),
            compressed_slices(case.seq_len, case.cu_seqlens, spec),
            strict=True,
        )
    ]
    for t in queries.tolist():
        doc, keys = next((d, k) for d, k in pieces if d.start <= t < d.stop)
        at, own = t - doc.start, (t - doc.start) // spec.select_len
        ranked = (blocks >= spec.init_blocks) & (blocks <= own - spec.local_blocks)
        query = q[:, t].detach().unflatten(1, (groups, -1))  # [B, K, G, D]
        ranking = query if q_cmp is None else q_cmp[:, t].unflatten(1, (groups, -1))
        seen = spec.visible_compressed(at)
        position = torch.arange(at + 1)
        inside = torch.arange(seen)[:, None] * spec.block_stride + torch.arange(spec.block_len)
        masses = [
            attention(query, k_sel[:, doc.start : t + 1].detach(), case) @ one_hot(position, case),
            attention(ranking, k_cmp[:, keys][:, :seen], case) @ one_hot(inside, case).mean(1),
        ]
        target, p = (mass.mean(2) * ranked for mass in masses)  # [B, K, M]
        log_target, log_p = (
            x.clamp(min=TINY).log() - x.sum(-1, keepdim=True).clamp(min=TINY).log()
            for x in (target, p)
        )
        total = total + (target * (log_target - log_p)).sum()
        targets.append(target)
    return total / (q.shape[0] * groups * len(queries)), torch.stack(targets, 2)


def attention(query: Tensor, k: Tensor, case: Case) -> Tensor:
    """Softmax over keys [B, n, K, D] of queries [B, K, G, D]: [B, K, G, n]."""
    return (case.scale * torch.einsum("bkgd,bnkd->bkgn", query, k)).softmax(-1)


def one_hot(position: Tensor, case: Case) -> Tensor:
    """The selection block of positions [..]: [.., M], in float64."""
    blocks = torch.arange(case.spec.select_blocks_len(case.seq_len))
    return (position[..., None] // case.spec.select_len == blocks).double()


def results(
    case: Case,
    backend: str,
    x: Inputs,
    queries: Tensor | None = None,
    heads: int = 0,
) -> list[Tensor]:
    """Loss, target, and the gradient of compressed keys; "definition" is a backend too.

    With `heads` per KV head, other queries than q rank blocks; their gradient comes last.
    """
    queries = (sampled(case) if queries is None else queries).to(x.q.device)

    def run(k_cmp: Tensor, q_cmp: Tensor | None = None) -> tuple[Tensor, ...]:
        if backend == "definition":
            return defined_loss(x.q, k_cmp, x.k_sel, queries, case, q_cmp)
        options = {"cu_seqlens": case.offsets_on(x.q.device), "backend": backend, "q_cmp": q_cmp}
        return selector_loss(x.q, k_cmp, x.k_sel, queries, case.spec, **options)

    inputs = [x.k_cmp, *([ranking_queries(x, heads)] if heads else [])]
    return only_loss(with_gradients(lambda *given: split(run(*given)), inputs))


def ranking_queries(x: Inputs, heads: int) -> Tensor:
    """Queries [B, T, Hkv · heads, Dk], none of which is one of q."""
    draw = torch.Generator().manual_seed(heads)
    shape = *x.q.shape[:2], x.k_cmp.shape[2] * heads, x.q.shape[3]
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(x.q)


def split(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The target has no gradient, and `with_gradients` would weigh it into the loss."""
    loss, target = outputs
    return loss, target.detach()


def only_loss(outputs: list[Tensor]) -> list[Tensor]:
    return [x for x in outputs if x.numel()]
