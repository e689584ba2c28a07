"""φ: one key (or value) for each compressed block of `l` positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.layout import Layout, Rotary


class MLPCompressor(nn.Module):
    """Learned intra-block positions added to a block's vectors, then a two-layer MLP.

    The hidden layer is what lets the positions matter: a linear φ would turn them into one
    constant.
    """

    def __init__(self, block_len: int, size: int, hidden: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(block_len, size))
        self.up = nn.Linear(block_len * size, hidden, bias=False)
        self.down = nn.Linear(hidden, size, bias=False)

    def forward(self, blocks_BNlKD: Tensor) -> Tensor:
        x = (blocks_BNlKD.transpose(2, 3) + self.position).flatten(-2)
        return self.down(F.gelu(self.up(x)))


class MeanCompressor(nn.Module):
    """The mean of rotated keys and of values; nothing to learn."""

    def forward(self, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """[B, T, K, D] to [B, N, K, D]."""
        assert layout.blocks is not None
        assert layout.block_rotary is not None
        turned = layout.rotary.turn(k)
        return self.of_blocks(turned[:, layout.blocks], v[:, layout.blocks], layout.block_rotary)

    def of_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        """Blocks [B, N, l, K, D], of keys that are turned; `last` is not looked at."""
        return k.mean(2), v.mean(2)


class MLPKeyValueCompressor(nn.Module):
    """An MLP φ for keys, rotated afterwards at the block's last position, and one for values."""

    def __init__(self, block_len: int, key_size: int, value_size: int, hidden: int) -> None:
        super().__init__()
        self.key = MLPCompressor(block_len, key_size, hidden)
        self.value = MLPCompressor(block_len, value_size, hidden)

    def forward(self, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """[B, T, K, D] to [B, N, K, D]."""
        assert layout.blocks is not None
        assert layout.block_rotary is not None
        return self.of_blocks(k[:, layout.blocks], v[:, layout.blocks], layout.block_rotary)

    def of_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        """Blocks [B, N, l, K, D], of keys that are not turned yet; `last` turns each one's sum."""
        return last.turn(self.key(k)), self.value(v)
