"""Attention metadata: positions and compressed blocks restart with each document."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.model import AttentionConfig
from nsa.model.attention_metadata import AttentionMetadata, apply_rotary
from nsa.spec import NSASpec
from tests.model.models import packed, tiny
from tests.model.test_rotary import by_hand

SPARSE = AttentionConfig(spec=NSASpec(4, 3, 4, 2, 1, 1, 6))
DOCUMENTS = packed(10, 0, 3, 4)


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


def test_a_document_shorter_than_a_block_has_no_blocks() -> None:
    block_tokens = build(3).block_tokens
    assert block_tokens is not None
    assert block_tokens.shape == (0, 4)


def test_dense_attention_has_no_blocks() -> None:
    metadata = build(9, attention=AttentionConfig(kind="dense"))
    assert metadata.block_tokens is None
    assert metadata.block_rotary is None
