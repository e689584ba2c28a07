"""Compressed keys for the selector loss: their gradient reaches φ and the keys' projection alone.

    x -> project -> compress -> k_cmp                    of the compressed branch
           port  -> compress, with k_cmp as its output   for the loss: gradients of φ and projection

The values are those of the compressed branch, so nothing is computed again. Without a port (see
`parallel_linear_with_port`) or with φ = `mlp` they are, from detached hidden states.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.compressor import MLPCompressor, PoolCompressor
from nsa.model.fused import head_norm, is_plain
from nsa.model.rotary import apply_rotary
from nsa.ops import PackedLayout, rotary_pool
from nsa.ops.custom_op import known_outputs
from nsa.ops.inputs import RotaryPoolInputs
from nsa.ops.rotary import RotaryPooled


def port_rows(layer: Any, metadata: AttentionMetadata) -> slice | None:
    """Return the rows of a fused projection that need a port: the keys that φ reads; or None."""
    changed = layer.config.qk_norm or layer.config.qkv_bias  # keys are no product of rows alone
    if metadata.sampled is None or metadata.sequence is not None or changed:
        return None
    first = layer.heads * layer.key_dim
    rows = slice(first, first + layer.kv_heads * layer.key_dim)
    return None if isinstance(layer.compress, MLPCompressor) else rows


class PortedKeys(NamedTuple):
    """A port for the keys that φ reads, and outputs of the layer's forward pass to reuse."""

    port: Tensor  # [B, T, K · D]
    parts: RotaryPooled
    pooled: list[Any]  # of φ = `pool`: the op's outputs for keys, then for values


def ranking_keys(
    layer: Any, x: Tensor, k_cmp: Tensor, metadata: AttentionMetadata, reused: PortedKeys | None
) -> Tensor:
    """Return k_cmp [B, N, K, D] of an NSAttention layer with that gradient."""
    layout = PackedLayout(0, layer.kv_heads, layer.key_dim, 0, 1, first_copy=1, mean=True)
    k = _project(layer, x.detach(), layout, metadata) if reused is None else reused.port
    if metadata.sequence is not None:
        layout = metadata.sequence.shard(layout)
    rotary = metadata.rotary.cos, metadata.rotary.sin
    if layer.layout.mean:  # its gradient does not depend on the keys' values
        tables = metadata.block_tokens, metadata.token_blocks
        q, gates, _, *others = RotaryPoolInputs(k, *rotary, *tables, [*layout]).empty_outputs()
        with known_outputs((q, gates, k_cmp, *others)) if reused else nullcontext():
            means = rotary_pool(k, layout, *rotary, *tables, backend=layer.backend).compressed
        assert means is not None
        return means[0]
    k = k.unflatten(-1, (layout.kv_heads, layer.key_dim))
    if isinstance(layer.compress, PoolCompressor):
        if reused is not None:
            assert reused.parts.compressed is not None
            k = _WithGradientTo.apply(reused.parts.compressed[0].detach(), k)
        with known_outputs(reused.pooled[0]) if reused else nullcontext():
            return layer.compress.key(k, metadata.block_rotary, metadata, layer.backend)
    if layer.compress.rotate_first:
        k = apply_rotary(k, metadata.rotary)
    return layer.compress(k, k.new_zeros(*k.shape[:3], layer.value_dim), metadata)[0]


def _project(layer: Any, x: Tensor, layout: PackedLayout, metadata: AttentionMetadata) -> Tensor:
    """Project x again to the keys that φ reads."""
    rows = layer.kv_heads * layer.key_dim
    plain = is_plain(layer.k, nn.Linear)
    bias = None if layer.k.bias is None else layer.k.bias[:rows]
    k = F.linear(x, layer.k.weight[:rows], bias) if plain else layer.k(x)[..., :rows]
    if layer.config.qk_norm:
        k = head_norm(k, layer.k_norm)
    return k if metadata.sequence is None else metadata.sequence.tokens_to_heads(k, layout)


class _WithGradientTo(torch.autograd.Function):
    """`values`, whose gradient goes to a port of the same shape."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, port: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
