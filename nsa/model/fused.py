"""Fused calls of plain modules: projections of one input as one product, residual add and norm.

Parameters stay in their own modules under their own names, so checkpoints, ZeRO partitions and
exports need no mapping. Modules that are not plain are called one by one: a fused call would
bypass adapters and hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from nsa.ops import add_rms_norm, tied_embedding


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling `module` runs `kind.forward` on plain parameters and nothing else.

    False with hooks (ZeRO-3 gathers weights in them), a `forward` replaced on the instance
    (accelerate), another class (LoRA adapters, parametrizations, FSDP2, quantized modules), or
    parameters of a tensor subclass (DTensor, torchao). Hooks with the attribute `observes` only
    record and do not count: without fusion products round differently, and a recorder of the first
    step must not change it.
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not module._forward_pre_hooks
        and all(getattr(hook, "observes", False) for hook in module._forward_hooks.values())
        and not module._backward_pre_hooks
        and not module._backward_hooks
        and not torch_module._has_any_global_hook()
        and all(
            type(x) in (nn.Parameter, Tensor) for x in module._parameters.values() if x is not None
        )
    )


def parallel_linear(x: Tensor, linears: Sequence[nn.Linear], pad_to: int = 8) -> Tensor:
    """Return the outputs of bias-free linears on x [.., in] side by side: [.., sum of out + pad].

    The width is padded to a multiple of `pad_to`, because cuBLAS is fast if rows are a multiple of
    16 bytes. The padding's values are finite and arbitrary; its gradient must be 0. Weights that
    are adjacent in memory, as in the flat buffers of ZeRO-1 and 2, are not copied. Others are
    concatenated on each pass: about 0.2 GB per micro-batch of M7C, estimated from tensor sizes.
    """
    if all(is_plain(linear, nn.Linear) and linear.bias is None for linear in linears):
        weights: list[Tensor] = [linear.weight for linear in linears]
        width = sum(len(weight) for weight in weights)
        rows = width + -width % pad_to
        if not torch.compiler.is_compiling() and are_adjacent(weights, rows):
            return F.linear(x, _AdjacentView.apply(rows, *weights))
        # With few rows, as in decoding, reading the weights dominates: a copy would triple it.
        if x.numel() // x.shape[-1] >= width // 8:
            pad = [weights[0].new_zeros(rows - width, x.shape[-1])] if rows > width else []
            return F.linear(x, torch.cat([*weights, *pad]))
    outputs = torch.cat([linear(x) for linear in linears], -1)
    return F.pad(outputs, (0, -outputs.shape[-1] % pad_to))


def are_adjacent(weights: Sequence[Tensor], rows: int) -> bool:
    """Whether matrices follow each other in one storage that holds `rows` rows from the first."""
    first, start = weights[0], weights[0].storage_offset()
    at = start
    for weight in weights:
        aliased = torch._C._is_alias_of(first, weight)  # type: ignore[attr-defined]
        same = aliased and weight.dtype == first.dtype
        if not (same and weight.is_contiguous() and weight.storage_offset() == at):
            return False
        at += weight.numel()
    end = start + rows * first.shape[1]
    return end * first.element_size() <= first.untyped_storage().nbytes()


class _AdjacentView(torch.autograd.Function):
    """One view [rows, in] of adjacent weights, and of what follows them in memory."""

    @staticmethod
    def forward(ctx: Any, rows: int, *weights: Tensor) -> Tensor:
        ctx.sizes = [len(weight) for weight in weights]
        ctx.sizes.append(rows - sum(ctx.sizes))
        first = weights[0].detach()
        return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradient.split(ctx.sizes)[:-1]


def add_norm(
    x: Tensor, delta: Tensor | None, norm: nn.RMSNorm, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, norm(x + delta)); delta None adds nothing."""
    if is_plain(norm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None:
        return add_rms_norm(x, delta, norm.weight, norm.eps, backend=backend)
    total = x if delta is None else x + delta
    return total, norm(total)


def embed_and_head(
    tokens: Tensor, embed: nn.Embedding, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (embed(tokens), the weight that the head reads)."""
    if is_plain(embed, nn.Embedding):
        return tied_embedding(tokens, embed.weight, backend=backend)
    return embed(tokens), embed.weight
