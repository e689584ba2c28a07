"""Compressor φ: maps the `l` keys (or values) of each compressed block to one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.rotary import Rotary, apply_rotary


class Compressor(nn.Module):
    """Base of all φ. A subclass maps blocks; `rotate_first` sets which keys its blocks hold."""

    rotate_first = True  # False: pre-RoPE keys, for a φ that applies RoPE to its result

    def forward(self, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Pre-RoPE keys and values [B, T, K, D] to compressed ones [B, N, K, D]."""
        assert metadata.block_tokens is not None
        assert metadata.block_rotary is not None
        if self.rotate_first:
            k = apply_rotary(k, metadata.rotary)
        blocks = metadata.block_tokens
        return self.compress_blocks(k[:, blocks], v[:, blocks], metadata.block_rotary)

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        """Blocks [B, N, l, K, D] to [B, N, K, D]; `last` is RoPE at each block's last position."""
        raise NotImplementedError


class MeanCompressor(Compressor):
    """The mean of rotated keys and of values; no parameters."""

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        return k.mean(2), v.mean(2)


class MLPCompressor(nn.Module):
    """Learned intra-block position embeddings added to a block's vectors, then a two-layer MLP.

    A linear φ would reduce the position embeddings to one constant; the hidden layer does not.
    """

    def __init__(self, block_len: int, size: int, hidden: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(block_len, size))
        self.up = nn.Linear(block_len * size, hidden, bias=False)
        self.down = nn.Linear(hidden, size, bias=False)

    def forward(self, blocks_BNlKD: Tensor) -> Tensor:
        x = (blocks_BNlKD.transpose(2, 3) + self.position).flatten(-2)
        return self.down(F.gelu(self.up(x)))


class MLPKeyValueCompressor(Compressor):
    """One MLP for pre-RoPE keys, whose result is rotated, and one for values."""

    rotate_first = False

    def __init__(self, block_len: int, key_size: int, value_size: int, hidden: int) -> None:
        super().__init__()
        self.key = MLPCompressor(block_len, key_size, hidden)
        self.value = MLPCompressor(block_len, value_size, hidden)

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        return apply_rotary(self.key(k), last), self.value(v)
