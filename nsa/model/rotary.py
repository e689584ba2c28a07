"""Rotary position embeddings (RoPE): tables of cosines and sines, and their application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Tables of cosines and sines, float32 [positions, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position: Tensor, head_dim: int, theta: float) -> Rotary:
        exponent = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32)
        angle = position[:, None].float() * theta ** (-exponent / head_dim)
        return cls(angle.cos()[:, None], angle.sin()[:, None])


def apply_rotary(x_BTHD: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the two halves of each head as pairs, in at least float32."""
    return _ApplyRotary.apply(x_BTHD, rotary.cos, rotary.sin)


class _ApplyRotary(torch.autograd.Function):
    """The rotation; its backward pass is the inverse rotation.

    It launches four kernels each way. Autograd's nine forward and ten backward were most of a small
    model's launches.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    pairs = x.unflatten(-1, (2, -1))
    rotated = pairs * cos[..., None, :]
    rotated[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-sign)
    rotated[..., 1, :].addcmul_(pairs[..., 0, :], sin, value=sign)
    return rotated.flatten(-2).to(x.dtype)
