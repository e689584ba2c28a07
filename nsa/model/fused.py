"""Fused calls of plain modules: projections of one input as one product, residual add and norm.

Parameters stay in their own modules under their own names, so checkpoints, ZeRO partitions and
exports need no mapping. Modules that are not plain are called one by one: a fused call would
bypass adapters and hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from nsa.ops import add_rms_norm

PAD_TO = 8  # cuBLAS is fast if rows are a multiple of 16 bytes
PLAIN = (nn.Parameter, Tensor, type(None))  # what a plain module's parameters are


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling `module` runs `kind.forward` on plain parameters and nothing else.

    False with hooks (ZeRO-3 gathers weights in them), a `forward` replaced on the instance
    (accelerate), another class (LoRA adapters, parametrizations, FSDP2, quantized modules), or
    parameters of a tensor subclass (DTensor, torchao).
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not (module._forward_pre_hooks or module._forward_hooks)
        and not (module._backward_pre_hooks or module._backward_hooks)
        and not torch_module._has_any_global_hook()
        and all(type(x) in PLAIN for x in module._parameters.values())
    )


def parallel_linear(x: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """Return the outputs of linears on x [.., in] side by side: [.., sum of out + pad].

    The width is padded to a multiple of PAD_TO. The padding's values are finite and arbitrary; its
    gradient must be 0. Weights that are adjacent in memory, as in the flat buffers of ZeRO-1 and 2,
    are not copied. Others are concatenated on each pass: about 0.2 GB per micro-batch of M7C,
    estimated from tensor sizes.
    """
    compiling = torch.compiler.is_compiling()
    if all(is_plain(linear, nn.Linear) for linear in linears):
        weights: list[Tensor] = [linear.weight for linear in linears]
        width = sum(weight.shape[0] for weight in weights)
        rows = width + -width % PAD_TO
        bias = _biases(linears, rows)
        if not compiling and are_adjacent(weights, rows):
            return F.linear(x, _SideBySide.apply(rows, *weights), bias)
        # With few rows, as in decoding, reading the weights dominates: a copy would triple it.
        if x.numel() // x.shape[-1] >= width // 8:
            return F.linear(x, _concatenate(weights, rows), bias)
    outputs = torch.cat([linear(x) for linear in linears], -1)
    return F.pad(outputs, (0, -outputs.shape[-1] % PAD_TO))


def _biases(linears: Sequence[nn.Linear], rows: int) -> Tensor | None:
    """Return the biases side by side, 0 where a linear has none; None if all have none."""
    if all(linear.bias is None for linear in linears):
        return None
    weight = linears[0].weight
    biases: list[Tensor] = [
        weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in linears
    ]
    return F.pad(_cat(biases), (0, rows - sum(map(len, biases))))


def _concatenate(weights: Sequence[Tensor], rows: int) -> Tensor:
    """Return a copy of the matrices below each other, and zeros up to `rows`."""
    pad = weights[0].new_zeros(rows - sum(map(len, weights)), weights[0].shape[1])
    return _cat([*weights, pad] if len(pad) else list(weights))


def _cat(parameters: list[Tensor]) -> Tensor:
    """Concatenate parameters; autocast's cat refuses fp16 ones in bf16 and bf16 ones in fp16."""
    device = parameters[0].device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        return torch.cat(parameters)


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


class _SideBySide(torch.autograd.Function):
    """One matrix [rows, in]: a view of adjacent weights and of what follows them."""

    @staticmethod
    def forward(ctx: Any, rows: int, *weights: Tensor) -> Tensor:
        sizes = [weight.shape[0] for weight in weights]
        ctx.sizes = [*sizes, rows - sum(sizes)]
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


def head_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Normalize each head of x [.., heads · head_dim]."""
    return norm(x.unflatten(-1, (-1, norm.weight.shape[0]))).flatten(-2)


def norm_columns(packed: Tensor, columns: Sequence[int], norms: Sequence[nn.RMSNorm]) -> Tensor:
    """Normalize the heads of the first columns of packed [.., P], each part with its norm."""
    *parts, rest = packed.split([*columns, packed.shape[-1] - sum(columns)], -1)
    normed = [head_norm(part, norm) for part, norm in zip(parts, norms, strict=True)]
    return torch.cat([*normed, rest], -1)
