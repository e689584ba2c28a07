"""Rotary position embeddings (RoPE): tables of cosines and sines, and their application."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops.rotary import rotate


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
    return rotate(x_BTHD, rotary.cos, rotary.sin).to(x_BTHD.dtype)
