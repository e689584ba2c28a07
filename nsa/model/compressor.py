"""Compressor φ: pools the `l` keys (or values) of each compressed block into one.

The mean has no parameters: nsa.ops.rotary_pool computes it from rotated keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention_metadata import AttentionMetadata, Rotary, apply_rotary
from nsa.ops.pooling import pool, sum_covering


class Compressor(nn.Module):
    """Base class of φ. A subclass pools the blocks that `forward` cuts, or overrides `forward`."""

    def forward(self, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Compress keys before RoPE and values [B, T, K, D] to [B, N, K, D]."""
        assert metadata.block_rotary is not None
        blocks = cut_blocks(k, metadata), cut_blocks(v, metadata)
        return self.compress_blocks(*blocks, metadata.block_rotary)

    def compress_blocks(self, k: Tensor, v: Tensor, block_rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Pool blocks [B, N, l, K, D] to [B, N, K, D]; `block_rotary`: RoPE at their ends."""
        raise NotImplementedError


def cut_blocks(x: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Cut keys or values [B, T, K, D] into compressed blocks [B, N, l, K, D], which may overlap."""
    return _CutBlocks.apply(x, metadata.block_tokens, metadata.token_blocks)


class _CutBlocks(torch.autograd.Function):
    """x[:, block_tokens]; PyTorch's own backward pass of indexing would sort and scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block_tokens: Tensor, token_blocks: Tensor) -> Tensor:
        ctx.save_for_backward(block_tokens, token_blocks)
        return x[:, block_tokens]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sum_covering(gradient, *ctx.saved_tensors), None, None


class BlockMLP(nn.Module):
    """Adds learned position embeddings to a block's vectors, then applies a two-layer MLP.

    Without a nonlinearity the position embeddings would only add a constant to the output.
    `hidden` is the width between the two layers.
    """

    def __init__(self, block_len: int, size: int, hidden: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(block_len, size))
        self.up = nn.Linear(block_len * size, hidden, bias=False)
        self.down = nn.Linear(hidden, size, bias=False)

    def forward(self, blocks: Tensor) -> Tensor:  # [B, N, l, K, D] to [B, N, K, D]
        x = (blocks.transpose(2, 3) + self.position).flatten(-2)
        return self.down(F.gelu(self.up(x)))


class MLPCompressor(Compressor):
    """One MLP pools pre-RoPE keys, then RoPE is applied; another MLP pools values."""

    def __init__(self, block_len: int, key_size: int, value_size: int) -> None:
        super().__init__()
        self.key = BlockMLP(block_len, key_size, hidden=key_size)
        self.value = BlockMLP(block_len, value_size, hidden=key_size)  # hidden: as for keys

    def compress_blocks(self, k: Tensor, v: Tensor, block_rotary: Rotary) -> tuple[Tensor, Tensor]:
        return apply_rotary(self.key(k), block_rotary), self.value(v)


class BlockPool(nn.Module):
    """A weighted mean of a block's vectors, one weight per token and channel; starts as the mean.

    Each KV head has parameters of its own. nsa/ops/pooling.py has the definition.
    """

    def __init__(self, block_len: int, kv_heads: int, size: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(kv_heads, size, size))
        self.position = nn.Parameter(torch.empty(kv_heads, block_len, size))
        self.scale = nn.Parameter(torch.empty(kv_heads * size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.position.zero_()
        self.scale.fill_(1)

    def forward(self, x: Tensor, rotary: Rotary | None, metadata: AttentionMetadata) -> Tensor:
        """Pool x [B, T, K, D] to [B, N, K, D], and apply `rotary`, if any."""
        assert metadata.block_tokens is not None
        assert metadata.token_blocks is not None
        weights = self.weight, self.position, self.scale
        tables = rotary, metadata.block_tokens, metadata.token_blocks
        return pool(x, *weights, *tables, backend=self.backend)


class PoolCompressor(Compressor):
    """One BlockPool pools pre-RoPE keys, then RoPE is applied; another pools values."""

    def __init__(
        self, block_len: int, kv_heads: int, key_size: int, value_size: int, backend: str
    ) -> None:
        super().__init__()
        self.key = BlockPool(block_len, kv_heads, key_size, backend)
        self.value = BlockPool(block_len, kv_heads, value_size, backend)

    def forward(self, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        return self.key(k, metadata.block_rotary, metadata), self.value(v, None, metadata)
