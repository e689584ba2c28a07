"""Attention metadata: RoPE, and positions and compressed blocks that restart with each document."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa.model import AttentionConfig, ModelConfig
from nsa.model.attention_metadata import AttentionMetadata, Rotary, apply_rotary
from nsa.spec import NSASpec
from tests.model.models import IMPORTED, packed, tiny

SPARSE = AttentionConfig(spec=NSASpec(4, 3, 4, 2, 1, 1, 6))
DOCUMENTS = packed(10, 0, 3, 4)


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


def test_yarn_scales_both_tables_by_its_attention_factor() -> None:
    tables = Rotary.at(torch.arange(9), tiny("dense", **IMPORTED))
    norm = (tables.cos**2 + tables.sin**2).sqrt()
    torch.testing.assert_close(norm, torch.full_like(norm, 0.1 * math.log(4) + 1))


def build(
    length: int, cu_seqlens: Tensor | None = None, attention: AttentionConfig = SPARSE
) -> AttentionMetadata:
    return AttentionMetadata.build(tiny(attention), length, cu_seqlens, torch.device("cpu"))


def test_positions_and_blocks_restart_with_each_document() -> None:
    metadata = build(17, DOCUMENTS)
    x = torch.randn(1, 17, 1, 6, dtype=torch.float64)
    alone = [
        apply_rotary(x[:, start : start + length], build(length).rotary)
        for start, length in ((0, 10), (10, 3), (13, 4))
    ]
    assert torch.equal(apply_rotary(x, metadata.rotary), torch.cat(alone, 1))
    assert metadata.block_tokens is not None
    expected = [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [13, 14, 15, 16]]
    assert metadata.block_tokens.tolist() == expected


@pytest.mark.parametrize("spec", [NSASpec(4, 3, 4), NSASpec(5, 1, 4), NSASpec(3, 3, 4)], ids=str)
@pytest.mark.parametrize("documents", [None, DOCUMENTS, packed(2, 0, 15)])
def test_the_blocks_of_each_token_are_those_that_cover_it(
    spec: NSASpec, documents: Tensor | None
) -> None:
    metadata = build(17, documents, AttentionConfig(spec=spec))
    assert metadata.block_tokens is not None
    assert metadata.token_blocks is not None
    blocks = metadata.block_tokens.tolist()
    for token, covering in enumerate(metadata.token_blocks.tolist()):
        expected = [number for number, tokens in enumerate(blocks) if token in tokens]
        assert [number for number in covering if number != -1] == expected


def test_a_block_is_rotated_at_its_last_position_in_its_document() -> None:
    metadata = build(17, DOCUMENTS)
    x = torch.randn(1, 4, 1, 6, dtype=torch.float64)
    assert metadata.block_rotary is not None
    rotated = apply_rotary(x, metadata.block_rotary)
    for i, last in enumerate((3, 6, 9, 3)):
        torch.testing.assert_close(rotated[:, i], by_hand(x[:, i], last), rtol=0, atol=1e-5)
