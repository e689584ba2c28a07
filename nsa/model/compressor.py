"""Compressor φ: pools the `l` keys (or values) of each compressed block into one.

In the parallel forward pass nsa.ops.rotary_pool computes the mean; other φ run here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.rotary import Rotary, apply_rotary


class Compressor(nn.Module):
    """Base class of all φ: cuts keys and values into blocks. Subclasses pool a block."""

    rotate_first = True  # pools keys after RoPE; False: the subclass applies RoPE to its result

    def forward(self, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Compress keys, rotated if `rotate_first`, and values [B, T, K, D] to [B, N, K, D]."""
        blocks = cut_blocks(k, metadata), cut_blocks(v, metadata)
        assert metadata.block_rotary is not None
        return self.compress_blocks(*blocks, metadata.block_rotary)

    def compress_blocks(self, k: Tensor, v: Tensor, block_rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Pool blocks [B, N, l, K, D] to [B, N, K, D].

        `block_rotary`: RoPE at the blocks' last positions, for subclasses without `rotate_first`.
        """
        raise NotImplementedError


def cut_blocks(x: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Cut keys or values [B, T, K, D] into compressed blocks [B, N, l, K, D], which may overlap."""
    return _CutBlocks.apply(x, metadata.block_tokens, metadata.token_blocks)


class _CutBlocks(torch.autograd.Function):
    """x[:, block_tokens] with a backward pass that gathers; indexing's would sort and scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block_tokens: Tensor, token_blocks: Tensor) -> Tensor:
        ctx.save_for_backward(block_tokens, token_blocks)
        return x[:, block_tokens]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """[B, N, l, K, D] to [B, T, K, D]: a token adds up the blocks that cover it."""
        block_tokens, token_blocks = ctx.saved_tensors
        first = F.pad(block_tokens[:, 0], (0, 1))  # index -1 reads the last entry
        token = torch.arange(len(token_blocks), device=first.device)[:, None]
        row = token_blocks * block_tokens.shape[1] + token - first[token_blocks]  # [T, ⌈l/d⌉]
        row = row.where(token_blocks >= 0, -1)
        padded = F.pad(gradient.flatten(1, 2), (0, 0, 0, 0, 0, 1))
        return padded[:, row].sum(2), None, None


class MeanCompressor(Compressor):
    """The mean of the rotated keys, and of the values. It has no parameters."""

    def compress_blocks(self, k: Tensor, v: Tensor, block_rotary: Rotary) -> tuple[Tensor, Tensor]:
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

    def compress_blocks(self, k: Tensor, v: Tensor, block_rotary: Rotary) -> tuple[Tensor, Tensor]:
        return apply_rotary(self.key(k), block_rotary), self.value(v)
