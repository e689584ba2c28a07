"""One transformer block, which is also one activation-checkpoint segment.

Around the attention PyTorch's own operations are left as they are. On CUDA nn.RMSNorm is one kernel
(torch 2.9 on). SwiGLU is two forward and three back, without a copy in float32: 14 passes over its
hidden values, of which fusing would spare six, some 2% of M7C's step by count and not measured.
Compiled blocks would fuse both, but packed documents bring new shapes each step, and dense
attention over them does not compile.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention import Attend, DenseAttention, NSAttention
from nsa.model.config import ModelConfig
from nsa.model.layout import Layout


class SwiGLU(nn.Module):
    """silu(gate) * up, projected back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention, then pre-norm SwiGLU, each added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention: NSAttention | DenseAttention
        if config.attention.kind == "nsa":
            self.attention = NSAttention(config)
        else:
            self.attention = DenseAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config.width, config.mlp_width)

    def forward(self, x: Tensor, layout: Layout, attend: Attend | None = None) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        x = x + self.attention(self.attention_norm(x), layout, attend)
        return x + self.mlp(self.mlp_norm(x))
