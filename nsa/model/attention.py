"""Attention layers: Native Sparse Attention, and dense attention for its dense twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.constants import BRANCHES
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.compressor import Compressor, MeanCompressor, MLPCompressor
from nsa.model.config import ModelConfig
from nsa.model.rotary import apply_rotary
from nsa.ops import (
    compressed_attention,
    nsa_attention_and_blocks,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.documents import document_slices

# Replaces a layer's forward pass during decoding: (layer, x, metadata) -> output.
CachedAttention = Callable[[Any, Tensor, AttentionMetadata], Tensor]
BranchKV = dict[str, tuple[Tensor, Tensor]]  # keys and values by branch


class Attention(nn.Module):
    """Base class: the projections, and the order of steps.

        x -> project    q, gates, and pre-RoPE keys and values by branch
          -> branch_kv  compressed or rotated keys and values
          -> attend     gated sum of the branches
          -> o

    Dense attention has one branch, "all", and no gates.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention, dense = config.attention, config.attention.kind == "dense"
        self.branches = ("all",) if dense else attention.branch_names
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.key_dim, self.value_dim = config.head_dim, config.value_dim or config.head_dim
        copies = 1 if attention.shared_kv else len(self.branches)
        self.q = nn.Linear(config.width, self.heads * self.key_dim, bias=False)
        self.k = nn.Linear(config.width, copies * self.kv_heads * self.key_dim, bias=False)
        self.v = nn.Linear(config.width, copies * self.kv_heads * self.value_dim, bias=False)
        if not dense:
            self.gates = nn.Linear(config.width, self.heads * len(self.branches), bias=False)
        self.o = nn.Linear(self.heads * self.value_dim, config.width, bias=False)

    def forward(
        self, x: Tensor, metadata: AttentionMetadata, cached: CachedAttention | None = None
    ) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        if cached is not None:
            return cached(self, x, metadata)
        q, gates, keys, values = self.project(x, metadata)
        o = self.attend(q, gates, self.branch_kv(keys, values, metadata), metadata)
        if metadata.sequence is not None:
            o = metadata.sequence.heads_to_tokens(o)
        return self.o(o.flatten(-2))

    def project(
        self, x: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
        """Project to rotated queries, gates, and pre-RoPE keys and values by branch."""
        parts = [
            self.q(x).unflatten(-1, (1, self.heads, self.key_dim)),
            self.k(x).unflatten(-1, (-1, self.kv_heads, self.key_dim)),
            self.v(x).unflatten(-1, (-1, self.kv_heads, self.value_dim)),
        ]
        if self.branches != ("all",):
            parts.append(self.gates(x).unflatten(-1, (1, self.heads, len(self.branches))))
        if metadata.sequence is not None:
            parts = metadata.sequence.tokens_to_heads(*parts)
        q, k, v = apply_rotary(parts[0][:, :, 0], metadata.rotary), parts[1], parts[2]
        gates = torch.sigmoid(parts[3][:, :, 0]) if len(parts) == 4 else None
        return q, gates, self._by_branch(k), self._by_branch(v)

    def _by_branch(self, x: Tensor) -> dict[str, Tensor]:
        """Split a projection [B, T, copies, K, D] by branch; shared_kv has one copy for all."""
        copies = [x[:, :, 0]] * len(self.branches) if x.shape[2] == 1 else x.unbind(2)
        return dict(zip(self.branches, copies, strict=True))

    def branch_kv(
        self, keys: dict[str, Tensor], values: dict[str, Tensor], metadata: AttentionMetadata
    ) -> BranchKV:
        """Compress or rotate each branch's keys and values."""
        raise NotImplementedError

    def attend(
        self, q: Tensor, gates: Tensor | None, kv: BranchKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Return the gated sum of the branches, [B, T, Hq, Dv]."""
        raise NotImplementedError


class NSAttention(Attention):
    """Compressed, selected and window branches, mixed by one gate per query head and branch.

    A disabled branch has no parameters. Without the compressed branch, blocks are selected by the
    mean of the selected branch's keys.

    `observer`, if set, receives gates [B, T, Hq, 3], selected blocks [B, T, Hkv, n] and cu_seqlens
    of every forward pass, including recomputed ones. It must not modify them.
    """

    observer: Callable[[Tensor, Tensor, Tensor | None], None] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        attention = config.attention
        self.spec, self.backend = attention.spec, attention.backend
        self.compress: Compressor = MeanCompressor()
        if attention.compressor == "mlp":
            hidden = attention.compressor_hidden or self.key_dim
            self.compress = MLPCompressor(self.spec.block_len, self.key_dim, self.value_dim, hidden)

    def branch_kv(
        self, keys: dict[str, Tensor], values: dict[str, Tensor], metadata: AttentionMetadata
    ) -> BranchKV:
        """Without a compressed branch, compressed keys only select blocks and get no gradient."""
        kv: BranchKV = {}
        source = "cmp" if "cmp" in keys else "sel"
        if source in keys:
            with torch.set_grad_enabled(torch.is_grad_enabled() and source == "cmp"):
                kv["cmp"] = self.compress(keys[source], values[source], metadata)
        if "sel" in keys:
            kv["sel"] = apply_rotary(keys["sel"], metadata.rotary), values["sel"]
        if "win" in keys:
            shared = keys["win"] is keys.get("sel")
            rotated = kv["sel"][0] if shared else apply_rotary(keys["win"], metadata.rotary)
            kv["win"] = rotated, values["win"]
        return kv

    def attend(
        self, q: Tensor, gates: Tensor | None, kv: BranchKV, metadata: AttentionMetadata
    ) -> Tensor:
        assert gates is not None
        if self.branches != BRANCHES:
            return self._attend_subset(q, gates, kv, metadata.cu_seqlens)
        o, block_index = nsa_attention_and_blocks(
            q,
            *kv["cmp"],
            *kv["sel"],
            *kv["win"],
            gates,
            self.spec,
            cu_seqlens=metadata.cu_seqlens,
            backend=self.backend,
        )
        if self.observer is not None:
            self.observer(gates, block_index, metadata.cu_seqlens)
        return o

    def _attend_subset(
        self, q: Tensor, gates: Tensor, kv: BranchKV, cu_seqlens: Tensor | None
    ) -> Tensor:
        """Call one op per branch, without fusion or observer."""
        common: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": self.backend}
        outputs: dict[str, Tensor] = {}
        if "cmp" in kv:
            with torch.set_grad_enabled(torch.is_grad_enabled() and "cmp" in self.branches):
                outputs["cmp"], lse = compressed_attention(q, *kv["cmp"], self.spec, **common)
        if "sel" in kv:
            block_index = select_blocks(q, kv["cmp"][0], lse, self.spec, **common)
            outputs["sel"] = selected_attention(q, *kv["sel"], block_index, self.spec, **common)
        if "win" in kv:
            outputs["win"] = window_attention(q, *kv["win"], self.spec.window, **common)
        weights = zip(self.branches, gates.unbind(-1), strict=True)
        return torch.stack([gate[..., None] * outputs[name] for name, gate in weights]).sum(0)


class DenseAttention(Attention):
    """Plain causal attention over all previous tokens of the document."""

    def branch_kv(
        self, keys: dict[str, Tensor], values: dict[str, Tensor], metadata: AttentionMetadata
    ) -> BranchKV:
        return {"all": (apply_rotary(keys["all"], metadata.rotary), values["all"])}

    def attend(
        self, q: Tensor, gates: Tensor | None, kv: BranchKV, metadata: AttentionMetadata
    ) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, *kv["all"]))
        outputs = [
            F.scaled_dot_product_attention(
                q[:, :, doc], k[:, :, doc], v[:, :, doc], is_causal=True, enable_gqa=True
            )
            for doc in document_slices(q.shape[2], metadata.cu_seqlens)
            if doc.stop > doc.start
        ]
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)  # one document: no copy
        return o.transpose(1, 2)
