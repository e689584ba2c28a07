"""Fused calls of plain modules: projections of one input, and residual addition with RMSNorm.

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
PLAIN = (nn.Parameter, Tensor, type(None))  # types of a plain module's parameters


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


def parallel_linear(
    x: Tensor, linears: Sequence[nn.Linear], detached: Sequence[nn.Linear] = ()
) -> Tensor:
    """Return the outputs of linears on x [.., in] side by side: [.., sum of out + pad].

    The outputs of `detached` follow those of `linears`; their gradient does not reach x.
    The width is padded to a multiple of PAD_TO. The padding's values are finite and arbitrary; its
    gradient must be 0. Weights that are adjacent in memory, as in the flat buffers of ZeRO-1 and 2,
    are not copied. Others are concatenated on each pass: about 0.2 GB per micro-batch of M7C,
    estimated from tensor sizes.
    """
    every = [*linears, *detached]
    if all(is_plain(linear, nn.Linear) for linear in every):
        weights: list[Tensor] = [linear.weight for linear in every]
        width = sum(weight.shape[0] for weight in weights)
        padded = width + -width % PAD_TO
        # With few tokens, as in decoding, reading the weights dominates: a copy would triple it.
        copy_pays = x.shape[:-1].numel() >= width // 8  # tokens; an estimate, not measured
        weight = None  # [padded, in]
        if not torch.compiler.is_compiling() and are_adjacent(weights, padded):
            weight = _SideBySide.apply(padded, *weights)
        elif copy_pays:
            zeros = weights[0].new_zeros(padded - width, weights[0].shape[1])
            weight = _cat([*weights, zeros] if len(zeros) else weights)
        if weight is not None:
            bias = _biases(every, padded)
            if not detached:
                return F.linear(x, weight, bias)
            attached = sum(linear.weight.shape[0] for linear in linears)
            return _PartlyDetached.apply(x, weight, bias, attached)
    outputs = [linear(x) for linear in linears] + [linear(x.detach()) for linear in detached]
    packed = torch.cat(outputs, -1)
    return F.pad(packed, (0, -packed.shape[-1] % PAD_TO))


def _biases(linears: Sequence[nn.Linear], rows: int) -> Tensor | None:
    """Return the biases side by side, 0 where a linear has none; None if all have none."""
    if all(linear.bias is None for linear in linears):
        return None
    weight = linears[0].weight
    biases: list[Tensor] = [
        weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in linears
    ]
    return F.pad(_cat(biases), (0, rows - sum(map(len, biases))))


def _cat(parameters: list[Tensor]) -> Tensor:
    """Concatenate parameters without autocast, whose cat refuses fp16 under bf16 and vice versa."""
    device = parameters[0].device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        return torch.cat(parameters)


def are_adjacent(weights: Sequence[Tensor], rows: int) -> bool:
    """Whether matrices follow each other in one storage, which has room for `rows` rows of them."""
    first = weights[0]
    expected_offset = first.storage_offset()
    for weight in weights:
        if not torch._C._is_alias_of(first, weight):  # type: ignore[attr-defined]
            return False
        if weight.dtype != first.dtype or not weight.is_contiguous():
            return False
        if weight.storage_offset() != expected_offset:
            return False
        expected_offset += weight.numel()
    end = first.storage_offset() + rows * first.shape[1]
    return end * first.element_size() <= first.untyped_storage().nbytes()


class _SideBySide(torch.autograd.Function):
    """View adjacent weights, and the memory after them as padding, as one matrix [rows, in]."""

    @staticmethod
    def forward(ctx: Any, rows: int, *weights: Tensor) -> Tensor:
        sizes = [weight.shape[0] for weight in weights]
        ctx.sizes = [*sizes, rows - sum(sizes)]
        first = weights[0].detach()
        return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradient.split(ctx.sizes)[:-1]


class _PartlyDetached(torch.autograd.Function):
    """`F.linear`, of which only the first `attached` outputs give x a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, attached: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.attached = attached
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = gradient.flatten(0, -2)  # [tokens, rows]; under autocast its dtype is not x's
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        d_x = d_weight = d_bias = None
        if needs_x:
            d_x = dy[:, : ctx.attached] @ weight[: ctx.attached].to(dy.dtype)
            d_x = d_x.to(x.dtype).view_as(x)
        if needs_weight:
            d_weight = (dy.T @ x.flatten(0, -2).to(dy.dtype)).to(weight.dtype)
        if needs_bias:
            d_bias = dy.sum(0).to(weight.dtype)
        return d_x, d_weight, d_bias, None


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


def norm_outputs(packed: Tensor, norms: Sequence[tuple[nn.Linear, nn.RMSNorm | None]]) -> Tensor:
    """Normalize the heads in packed [.., P], which starts with the outputs of these linears."""
    sizes = [len(linear.weight) for linear, _ in norms]
    outputs = list(packed.split([*sizes, packed.shape[-1] - sum(sizes)], -1))
    for i, (_, norm) in enumerate(norms):
        if norm is not None:
            outputs[i] = head_norm(outputs[i], norm)
    return torch.cat(outputs, -1)
