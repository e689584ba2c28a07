"""Tied embedding: the gradients of the head and of the tokens share one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import triton
from nsa.ops.backend import dispatch


def tied_embedding(
    tokens: Tensor, weight: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (weight[tokens], weight); the head must read the returned weight.

    So the head's gradient passes through here, and on a GPU the tokens' gradient is added to it in
    place. Autograd would allocate two more tensors of the weight's size: the tokens' gradient and
    the sum. There is no second derivative.
    """
    if torch.compiler.is_compiling():
        return F.embedding(tokens, weight), weight
    fused = dispatch(backend, "tied_embedding", weight, attention=False) is triton
    return _TiedEmbedding.apply(tokens, weight, fused)


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens)
        ctx.fused, ctx.rows = fused, len(weight)
        return F.embedding(tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(
        ctx: Any, d_x: Tensor | None, d_weight: Tensor | None
    ) -> tuple[None, Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        if d_x is None:
            return None, d_weight, None
        if d_weight is None or not ctx.fused:
            d_rows = torch.ops.aten.embedding_dense_backward(d_x, tokens, ctx.rows, -1, False)
            return None, d_rows if d_weight is None else d_rows.add_(d_weight), None
        # The head's product or autograd's sum created d_weight, and nothing else reads it.
        d_weight = d_weight.contiguous()
        from nsa.ops.triton.embedding import triton_add_token_gradients_

        triton_add_token_gradients_(d_weight, d_x, tokens)
        return None, d_weight, None
