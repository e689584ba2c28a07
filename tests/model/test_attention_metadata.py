"""RoPE of the attention metadata, against complex numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa.model import ModelConfig
from nsa.model.attention_metadata import Rotary, apply_rotary
from tests.model.models import IMPORTED, tiny


def by_hand(x: Tensor, position: int, theta: float = 10_000.0) -> Tensor:
    """RoPE with complex numbers: pair i rotates by position · θ^(−2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * position * frequency)
    return torch.cat([rotated.real, rotated.imag], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pairs_rotate_by_their_position_in_any_dtype_with_one_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(2, 40, 3, 6, dtype=torch.float64).to(dtype)
    rotated = apply_rotary(x, Rotary.at(torch.arange(40), ModelConfig(head_dim=6)))
    exact = torch.stack([by_hand(x[:, t].double(), t) for t in range(40)], 1)
    assert rotated.dtype == dtype
    assert torch.equal(rotated[:, 0], x[:, 0])
    step = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(rotated.double(), exact, rtol=step, atol=step)


def test_yarn_scales_both_tables_by_its_attention_factor() -> None:
    tables = Rotary.at(torch.arange(9), tiny("dense", **IMPORTED))
    norm = (tables.cos**2 + tables.sin**2).sqrt()
    torch.testing.assert_close(norm, torch.full_like(norm, 0.1 * math.log(4) + 1))
