"""Transformer block: attention and SwiGLU. It is one activation-checkpoint segment.

A block receives and returns the residual stream as two tensors, x and delta, whose sum is the
stream: the kernel of the next RMSNorm adds them (docs/design/kernels.md).
"""

from __future__ import annotations

from torch import Tensor, nn

from nsa.model.attention import MODEL_SETTINGS, Attention, CachedAttention, NSAttention
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.config import ModelConfig
from nsa.model.fused import add_norm, parallel_linear
from nsa.ops import swiglu


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, backend: str = "auto") -> None:
        super().__init__()
        self.hidden, self.backend = hidden, backend
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = parallel_linear(x, (self.gate, self.up))  # [B, T, gate | up | padding]
        return self.down(swiglu(gate_up, self.hidden, backend=self.backend))


class Block(nn.Module):
    """Pre-norm attention, then pre-norm SwiGLU, each with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.backend = config.attention.backend
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        if config.attention.kind == "dense":
            self.attention = Attention(config)
        else:
            names = "kv_heads", "head_dim", "value_dim", "rope_theta", *MODEL_SETTINGS
            settings = {name: getattr(config, name) for name in names}
            settings |= {k: v for k, v in vars(config.attention).items() if k != "kind"}
            self.attention = NSAttention(config.width, config.heads, **settings)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config.width, config.mlp_width, self.backend)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        *,
        metadata: AttentionMetadata,
        cached: CachedAttention | None = None,
    ) -> tuple[Tensor, ...]:
        """Map (x, delta) to (x, delta), each [B, T, width]; the first block receives no delta.

        With `metadata.sampled`, the queries of the selector loss, also return this block's loss.
        """
        x, normed = add_norm(x, delta, self.attention_norm, self.backend)
        delta = self.attention(normed, metadata=metadata, cached=cached)
        x, normed = add_norm(x, delta, self.mlp_norm, self.backend)
        loss = self.attention.take_selector_loss()
        return (x, self.mlp(normed)) if loss is None else (x, self.mlp(normed), loss)
