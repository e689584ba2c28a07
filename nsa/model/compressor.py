"""Compressor φ: pools the `l` keys (or values) of each compressed block into one.

In the parallel forward pass nsa.ops.rotary_pool computes the mean; other φ run here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.rotary import Rotary, apply_rotary


class Compressor(nn.Module):
    """Base class of all φ: cuts keys and values into blocks. Subclasses pool a block."""

    rotate_first = True  # pool rotated keys; False: the subclass applies RoPE to its result

    def forward(self, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Compress keys, rotated if `rotate_first`, and values [B, T, K, D] to [B, N, K, D]."""
        blocks, last = metadata.block_tokens, metadata.block_rotary
        assert blocks is not None
        assert last is not None
        return self.compress_blocks(k[:, blocks], v[:, blocks], last)

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        """Pool blocks [B, N, l, K, D] to [B, N, K, D]; `last`: RoPE at their last positions."""
        raise NotImplementedError


class MeanCompressor(Compressor):
    """The mean of the rotated keys, and of the values. It has no parameters."""

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        return k.mean(2), v.mean(2)


class BlockMLP(nn.Module):
    """Adds learned intra-block position embeddings to a block's vectors, then a two-layer MLP.

    With a linear φ, the position embeddings would only add a constant to its output.
    """

    def __init__(self, block_len: int, size: int, hidden: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(block_len, size))
        self.up = nn.Linear(block_len * size, hidden, bias=False)
        self.down = nn.Linear(hidden, size, bias=False)

    def forward(self, blocks_BNlKD: Tensor) -> Tensor:
        x = (blocks_BNlKD.transpose(2, 3) + self.position).flatten(-2)
        return self.down(F.gelu(self.up(x)))


class MLPCompressor(Compressor):
    """One MLP pools pre-RoPE keys, then RoPE is applied; another MLP pools values."""

    rotate_first = False

    def __init__(self, block_len: int, key_size: int, value_size: int, hidden: int) -> None:
        super().__init__()
        self.key = BlockMLP(block_len, key_size, hidden)
        self.value = BlockMLP(block_len, value_size, hidden)

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        return apply_rotary(self.key(k), last), self.value(v)
