"""Rotary position embeddings against complex multiplication."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.model.attention_metadata import Rotary, apply_rotary
from nsa.model.config import ModelConfig


def by_hand(x: Tensor, position: int, theta: float = 10_000.0) -> Tensor:
    """RoPE with complex numbers: pair i rotates by position · θ^(−2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * position * frequency)
    return torch.cat([rotated.real, rotated.imag], -1)


def rotary_at(*positions: int) -> Rotary:
    return Rotary.at(torch.tensor(positions), ModelConfig(head_dim=6))


def test_scores_depend_only_on_the_distance_of_query_and_key() -> None:
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)

    def at(x: Tensor, position: int) -> Tensor:
        return apply_rotary(x, rotary_at(position))

    for distance in (0, 1, 13):
        scores = [float((at(q, p + distance) * at(k, p)).sum()) for p in (0, 5, 700)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        assert scores[0] == pytest.approx(scores[2], abs=1e-4)
    assert float((at(q, 5) * at(k, 0)).sum()) != pytest.approx(float((q * k).sum()), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pairs_rotate_by_their_position_in_any_dtype_with_one_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(2, 40, 3, 6, dtype=torch.float64).to(dtype)
    rotated = apply_rotary(x, rotary_at(*range(40)))
    exact = torch.stack([by_hand(x[:, t].double(), t) for t in range(40)], 1)
    assert rotated.dtype == dtype
    assert torch.equal(rotated[:, 0], x[:, 0])
    step = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(rotated.double(), exact, rtol=step, atol=step)


def test_the_gradient_of_a_rotation_is_its_inverse() -> None:
    x, rotary = (
        torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True),
        rotary_at(*range(5)),
    )
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, rotary), x)
    gradient = apply_rotary(x.detach(), rotary)
    (back,) = torch.autograd.grad(apply_rotary(x, rotary), x, gradient)
    torch.testing.assert_close(back, x.detach(), rtol=0, atol=1e-6)
