"""RMSNorm with the residual add: one kernel each way on a GPU, PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import triton
from nsa.ops.backend import dispatch


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, rms_norm(x + delta) · weight), both [.., width]; delta None adds nothing.

    The norm is that of the rounded sum, in float32. x and delta share one gradient; there is no
    second derivative. The backends "blockwise" and "reference" both run PyTorch.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; x requires {tuple(x.shape[-1:])}"
        )
    if delta is not None:
        if delta.shape != x.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}; x requires {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, delta.dtype)  # they differ under autocast
        x, delta = x.to(dtype), delta.to(dtype)
    if dispatch(backend, "add_rms_norm", x, attention=False) is triton:
        from nsa.ops.triton.normalization import triton_add_rms_norm

        return triton_add_rms_norm(x, delta, weight, eps)
    total = x if delta is None else x + delta
    if torch.compiler.is_compiling():  # it plans its own backward pass
        return total, F.rms_norm(total, weight.shape, weight, eps)
    return total, _RMSNorm.apply(total, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """On a CPU, F.rms_norm is a dozen operations, and its backward pass another dozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = x.to(dtype)
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [.., 1]
        ctx.save_for_backward(x, weight, inverse)
        return (y * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_normed: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        dy = d_normed.to(inverse.dtype)
        d_weight = (dy * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        dy = dy * weight
        mean = torch.linalg.vecdot(dy, unit)[..., None].div_(x.shape[-1])
        dx = dy.addcmul_(unit, mean, value=-1).mul_(inverse)
        return dx.to(x.dtype), d_weight, None
