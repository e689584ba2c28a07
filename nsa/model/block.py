"""Transformer block: attention and SwiGLU. It is one activation-checkpoint segment.

RMSNorm and SwiGLU use PyTorch's ops: on CUDA nn.RMSNorm is one kernel (torch 2.9 on), and a fused
SwiGLU would save about 2% of M7C's step (estimated from operation counts; not measured).
torch.compile would fuse it, but packed documents have new shapes each step, and dense attention
over them does not compile.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention import CachedAttention, DenseAttention, NSAttention
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.config import ModelConfig


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention, then pre-norm SwiGLU, each with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sparse = config.attention.kind == "nsa"
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = NSAttention(config) if sparse else DenseAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config.width, config.mlp_width)

    def forward(
        self, x: Tensor, metadata: AttentionMetadata, cached: CachedAttention | None = None
    ) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        x = x + self.attention(self.attention_norm(x), metadata, cached)
        return x + self.mlp(self.mlp_norm(x))
