"""The two attentions: Native Sparse Attention, and the dense twin that it is measured against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.compressor import MeanCompressor, MLPKeyValueCompressor
from nsa.model.config import ModelConfig
from nsa.model.layout import Layout
from nsa.ops import nsa_attention_and_blocks
from nsa.ops.documents import document_slices

BRANCHES = 3  # compressed, selected, window: the order of keys, values and gates everywhere


class NSAttention(nn.Module):
    """Three branches over a token's past, mixed by gates that each query head sets for itself.

    `listener`, where somebody sets one, is told gates [B, T, Hq, 3], chosen blocks [B, T, Hkv, n]
    and cu_seqlens of every forward pass, recomputed ones included. It must leave them alone.
    """

    listener: Callable[[Tensor, Tensor, Tensor | None], None] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention = config.attention
        self.spec, self.backend = attention.spec, attention.backend
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.key_dim, self.value_dim = config.head_dim, config.value_dim or config.head_dim
        copies = 1 if attention.shared_kv else BRANCHES
        self.q = nn.Linear(config.width, self.heads * self.key_dim, bias=False)
        self.k = nn.Linear(config.width, copies * self.kv_heads * self.key_dim, bias=False)
        self.v = nn.Linear(config.width, copies * self.kv_heads * self.value_dim, bias=False)
        self.gates = nn.Linear(config.width, self.heads * BRANCHES, bias=False)
        self.o = nn.Linear(self.heads * self.value_dim, config.width, bias=False)
        self.compress: nn.Module = MeanCompressor()
        if attention.compressor == "mlp":
            self.compress = MLPKeyValueCompressor(
                self.spec.block_len,
                self.key_dim,
                self.value_dim,
                attention.compressor_hidden or self.key_dim,
            )

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        q, k, v, gates = layout.to_heads(
            self.q(x).unflatten(-1, (1, self.heads, self.key_dim)),
            self.k(x).unflatten(-1, (-1, self.kv_heads, self.key_dim)),
            self.v(x).unflatten(-1, (-1, self.kv_heads, self.value_dim)),
            self.gates(x).unflatten(-1, (1, self.heads, BRANCHES)),
        )
        q, gates = layout.rotary.turn(q[:, :, 0]), torch.sigmoid(gates[:, :, 0])
        k_cmp, k_sel, k_win = _branches(k)
        v_cmp, v_sel, v_win = _branches(v)
        k_cmp, v_cmp = self.compress(k_cmp, v_cmp, layout)
        # A shared key is turned once; independent ones are turned each.
        k_turned = layout.rotary.turn(k_sel)
        k_window = k_turned if k_win is k_sel else layout.rotary.turn(k_win)
        o, block_index = nsa_attention_and_blocks(
            q,
            k_cmp,
            v_cmp,
            k_turned,
            v_sel,
            k_window,
            v_win,
            gates,
            self.spec,
            cu_seqlens=layout.cu_seqlens,
            backend=self.backend,
        )
        if self.listener is not None:
            self.listener(gates, block_index, layout.cu_seqlens)
        return self.o(layout.to_tokens(o).flatten(-2))


class DenseAttention(nn.Module):
    """Plain causal attention over the whole past."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.key_dim, self.value_dim = config.head_dim, config.value_dim or config.head_dim
        self.q = nn.Linear(config.width, self.heads * self.key_dim, bias=False)
        self.k = nn.Linear(config.width, self.kv_heads * self.key_dim, bias=False)
        self.v = nn.Linear(config.width, self.kv_heads * self.value_dim, bias=False)
        self.o = nn.Linear(self.heads * self.value_dim, config.width, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        q, k, v = layout.to_heads(
            self.q(x).unflatten(-1, (1, self.heads, self.key_dim)),
            self.k(x).unflatten(-1, (1, self.kv_heads, self.key_dim)),
            self.v(x).unflatten(-1, (1, self.kv_heads, self.value_dim)),
        )
        q, k, v = layout.rotary.turn(q[:, :, 0]), layout.rotary.turn(k[:, :, 0]), v[:, :, 0]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, doc], k[:, :, doc], v[:, :, doc], is_causal=True, enable_gqa=True
            )
            for doc in document_slices(q.shape[2], layout.cu_seqlens)
            if doc.stop > doc.start
        ]
        return self.o(layout.to_tokens(torch.cat(parts, 2).transpose(1, 2)).flatten(-2))


def _branches(x: Tensor) -> list[Tensor]:
    """A projection [B, T, copies, K, size] as one a branch, the same one thrice where shared."""
    return [x[:, :, 0]] * BRANCHES if x.shape[2] == 1 else list(x.unbind(2))
