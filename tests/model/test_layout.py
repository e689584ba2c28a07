"""Rotary positions, and where compressed blocks lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.model.layout import Layout, Rotary
from nsa.spec import NSASpec
from tests.model.models import packed

SPEC = NSASpec(4, 3, 4, 2, 1, 1, 6)


def by_hand(x: Tensor, position: int, theta: float = 10_000.0) -> Tensor:
    """RoPE with complex numbers: pair i turns by position · θ^(−2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * position * frequency)
    return torch.cat([turned.real, turned.imag], -1)


def layout(length: int, cu_seqlens: Tensor | None = None, spec: NSASpec | None = SPEC) -> Layout:
    return Layout.of(length, cu_seqlens, spec, 6, 10_000.0, torch.device("cpu"))


def test_rope_turns_pairs_by_their_position() -> None:
    x = torch.randn(2, 40, 3, 6, dtype=torch.float64)
    turned = layout(40).rotary.turn(x)
    for t in (0, 1, 7, 39):
        torch.testing.assert_close(turned[:, t], by_hand(x[:, t], t), rtol=0, atol=1e-5)
    assert torch.equal(turned[:, 0], x[:, 0])


def test_what_a_query_and_a_key_make_of_each_other_depends_on_their_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)

    def at(x: Tensor, position: int) -> Tensor:
        return Rotary.at(torch.tensor([position]), 6, 10_000.0).turn(x)

    for distance in (0, 1, 13):
        scores = [float((at(q, p + distance) * at(k, p)).sum()) for p in (0, 5, 700)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        assert scores[0] == pytest.approx(scores[2], abs=1e-4)
    assert float((at(q, 5) * at(k, 0)).sum()) != pytest.approx(float((q * k).sum()), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_turning_keeps_the_dtype_and_rounds_once(dtype: torch.dtype) -> None:
    x = torch.randn(1, 40, 2, 6, dtype=torch.float64).to(dtype)
    turned = layout(40).rotary.turn(x)
    exact = torch.stack([by_hand(x[:, t].double(), t) for t in range(40)], 1)
    assert turned.dtype == dtype
    step = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(turned.double(), exact, rtol=step, atol=step)


def test_the_gradient_of_a_turn_is_the_turn_back() -> None:
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    rotary = layout(5).rotary
    assert torch.autograd.gradcheck(rotary.turn, x)
    (back,) = torch.autograd.grad(rotary.turn(x), x, rotary.turn(x.detach()))
    torch.testing.assert_close(back, x.detach(), rtol=0, atol=1e-6)


def test_positions_and_blocks_restart_with_each_document() -> None:
    both = layout(17, packed(10, 0, 3, 4))
    x = torch.randn(1, 17, 1, 6, dtype=torch.float64)
    alone = [layout(n).rotary.turn(x[:, s : s + n]) for s, n in ((0, 10), (10, 3), (13, 4))]
    assert torch.equal(both.rotary.turn(x), torch.cat(alone, 1))
    assert both.blocks is not None
    assert both.blocks.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [13, 14, 15, 16]]


def test_a_blocks_rotary_is_that_of_its_last_position_in_its_document() -> None:
    both = layout(17, packed(10, 0, 3, 4))
    x = torch.randn(1, 4, 1, 6, dtype=torch.float64)
    assert both.block_rotary is not None
    turned = both.block_rotary.turn(x)
    for i, last in enumerate((3, 6, 9, 3)):
        torch.testing.assert_close(turned[:, i], by_hand(x[:, i], last), rtol=0, atol=1e-5)


def test_a_document_shorter_than_a_block_has_none() -> None:
    assert layout(3).blocks is not None
    assert layout(3).blocks.shape == (0, 4)


def test_dense_attention_needs_no_blocks() -> None:
    assert layout(9, spec=None).blocks is None
    assert layout(9, spec=None).block_rotary is None
