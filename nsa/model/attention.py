"""The two attentions: Native Sparse Attention, and the dense twin that it is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.compressor import MeanCompressor, MLPKeyValueCompressor
from nsa.model.config import BRANCHES, ModelConfig
from nsa.model.layout import Layout
from nsa.ops import (
    compressed_attention,
    nsa_attention_and_blocks,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.documents import document_slices

# Who attends instead, given the layer: decoding, whose past is longer than what it puts in.
Attend = Callable[[Any, Tensor, Layout], Tensor]


class NSAttention(nn.Module):
    """Three branches over a token's past, mixed by gates that each query head sets for itself.

    With fewer branches there are parameters for those alone. Where the compressed one is missing,
    blocks are selected by the mean of the selected branch's own keys.

    `observer`, where somebody sets one, is told gates [B, T, Hq, 3], chosen blocks [B, T, Hkv, n]
    and cu_seqlens of every forward pass, recomputed ones included. It must leave them alone.
    """

    observer: Callable[[Tensor, Tensor, Tensor | None], None] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention = config.attention
        self.spec, self.backend = attention.spec, attention.backend
        self.branches = attention.branch_names
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.key_dim, self.value_dim = config.head_dim, config.value_dim or config.head_dim
        copies = 1 if attention.shared_kv else len(self.branches)
        self.q = nn.Linear(config.width, self.heads * self.key_dim, bias=False)
        self.k = nn.Linear(config.width, copies * self.kv_heads * self.key_dim, bias=False)
        self.v = nn.Linear(config.width, copies * self.kv_heads * self.value_dim, bias=False)
        self.gates = nn.Linear(config.width, self.heads * len(self.branches), bias=False)
        self.o = nn.Linear(self.heads * self.value_dim, config.width, bias=False)
        self.compress: MeanCompressor | MLPKeyValueCompressor = MeanCompressor()
        if attention.compressor == "mlp":
            self.compress = MLPKeyValueCompressor(
                self.spec.block_len,
                self.key_dim,
                self.value_dim,
                attention.compressor_hidden or self.key_dim,
            )

    def forward(self, x: Tensor, layout: Layout, attend: Attend | None = None) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        if attend is not None:
            return attend(self, x, layout)
        q, gates, keys, values = self.project(x, layout)
        o = self.attend(q, gates, self.attended_to(keys, values, layout), layout)
        return self.o(layout.to_tokens(o).flatten(-2))

    def project(
        self, x: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Turned queries, gates, and unturned keys and values of each branch."""
        q, k, v, gates = layout.to_heads(
            self.q(x).unflatten(-1, (1, self.heads, self.key_dim)),
            self.k(x).unflatten(-1, (-1, self.kv_heads, self.key_dim)),
            self.v(x).unflatten(-1, (-1, self.kv_heads, self.value_dim)),
            self.gates(x).unflatten(-1, (1, self.heads, len(self.branches))),
        )
        q, gates = layout.rotary.turn(q[:, :, 0]), torch.sigmoid(gates[:, :, 0])
        return q, gates, self._of_branches(k), self._of_branches(v)

    def attended_to(
        self, keys: dict[str, Tensor], values: dict[str, Tensor], layout: Layout
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Each branch's keys and values as queries meet them: compressed, or turned.

        Where only the selected branch asks for compressed ones, no gradient comes back to them.
        """
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        if "cmp" in keys:
            pairs["cmp"] = self.compress(keys["cmp"], values["cmp"], layout)
        elif "sel" in keys:
            with torch.no_grad():
                pairs["cmp"] = self.compress(keys["sel"], values["sel"], layout)
        if "sel" in keys:
            pairs["sel"] = layout.rotary.turn(keys["sel"]), values["sel"]
        if "win" in keys:
            # A shared key is turned once; independent ones are turned each.
            shared = keys["win"] is keys.get("sel")
            turned = pairs["sel"][0] if shared else layout.rotary.turn(keys["win"])
            pairs["win"] = turned, values["win"]
        return pairs

    def attend(
        self, q: Tensor, gates: Tensor, pairs: dict[str, tuple[Tensor, Tensor]], layout: Layout
    ) -> Tensor:
        """The branches, mixed: [B, T, Hq, Dv]."""
        if self.branches != BRANCHES:
            return self._some_branches(q, gates, pairs, layout)
        o, block_index = nsa_attention_and_blocks(
            q,
            *pairs["cmp"],
            *pairs["sel"],
            *pairs["win"],
            gates,
            self.spec,
            cu_seqlens=layout.cu_seqlens,
            backend=self.backend,
        )
        if self.observer is not None:
            self.observer(gates, block_index, layout.cu_seqlens)
        return o

    def _some_branches(
        self, q: Tensor, gates: Tensor, pairs: dict[str, tuple[Tensor, Tensor]], layout: Layout
    ) -> Tensor:
        """One branch after the other; there is nothing to fuse, and nobody listens."""
        common: dict[str, Any] = {"cu_seqlens": layout.cu_seqlens, "backend": self.backend}
        found: dict[str, Tensor] = {}
        if "cmp" in pairs:
            with torch.set_grad_enabled(torch.is_grad_enabled() and "cmp" in self.branches):
                found["cmp"], lse = compressed_attention(q, *pairs["cmp"], self.spec, **common)
        if "sel" in pairs:
            chosen = select_blocks(q, pairs["cmp"][0], lse, self.spec, **common)
            found["sel"] = selected_attention(q, *pairs["sel"], chosen, self.spec, **common)
        if "win" in pairs:
            found["win"] = window_attention(q, *pairs["win"], self.spec.window, **common)
        weights = zip(self.branches, gates.unbind(-1), strict=True)
        return torch.stack([gate[..., None] * found[name] for name, gate in weights]).sum(0)

    def _of_branches(self, x: Tensor) -> dict[str, Tensor]:
        """A projection [B, T, copies, K, size] for each branch, the same where they share it."""
        each = [x[:, :, 0]] * len(self.branches) if x.shape[2] == 1 else x.unbind(2)
        return dict(zip(self.branches, each, strict=True))


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

    def forward(self, x: Tensor, layout: Layout, attend: Attend | None = None) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        if attend is not None:
            return attend(self, x, layout)
        o = self.attend(*self.project(x, layout), layout)
        return self.o(layout.to_tokens(o).flatten(-2))

    def project(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries and keys, and values."""
        q, k, v = layout.to_heads(
            self.q(x).unflatten(-1, (1, self.heads, self.key_dim)),
            self.k(x).unflatten(-1, (1, self.kv_heads, self.key_dim)),
            self.v(x).unflatten(-1, (1, self.kv_heads, self.value_dim)),
        )
        return layout.rotary.turn(q[:, :, 0]), layout.rotary.turn(k[:, :, 0]), v[:, :, 0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Each document alone: [B, T, Hq, Dv]."""
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, doc], k[:, :, doc], v[:, :, doc], is_causal=True, enable_gqa=True
            )
            for doc in document_slices(q.shape[2], layout.cu_seqlens)
            if doc.stop > doc.start
        ]
        return torch.cat(parts, 2).transpose(1, 2)
