"""The selector loss of a layer: its gradient reaches φ and the keys' projection alone.

    x -> project -> compress -> k_cmp        of the compressed branch, which the loss ranks
           port  -> compress -> k_cmp's port      gets the loss's gradient: of φ and projection

A port has no values, so nothing is computed again. Without one (see `parallel_linear`), or with a φ
other than `mean` and `pool`, keys are projected and compressed again, from detached hidden states.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.compressor import BlockPool, PoolCompressor
from nsa.model.fused import head_norm, is_plain
from nsa.model.rotary import apply_rotary
from nsa.ops import PackedLayout, rotary_pool, selector_loss
from nsa.ops.custom_op import known_outputs
from nsa.ops.inputs import RotaryPoolInputs


def port_rows(layer: Any, metadata: AttentionMetadata) -> slice | None:
    """Return the rows of a fused projection that need a port: the keys that φ reads; or None."""
    changed = layer.config.qk_norm or layer.config.qkv_bias  # keys are no product of rows alone
    if metadata.sampled is None or metadata.sequence is not None or changed:
        return None
    first = layer.heads * layer.key_dim
    rows = slice(first, first + layer.kv_heads * layer.key_dim)
    compress = layer.compress
    if isinstance(compress, PoolCompressor):
        plain = is_plain(compress, PoolCompressor) and is_plain(compress.key, BlockPool)
        return rows if plain else None
    return rows if layer.layout.mean else None


def ranking_loss(
    layer: Any,
    x: Tensor,
    q: Tensor,
    kv: dict[str, tuple[Tensor, Tensor]],
    metadata: AttentionMetadata,
    port: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return an NSAttention layer's selector loss and target; the gradient does not reach x.

    So it trains only the ranking, not the hidden states that other layers read. With `port`
    compressed keys are not computed again.
    """
    assert metadata.sampled is not None
    keys = _ranking_keys(layer, x, kv["cmp"][0], metadata, port), kv["sel"][0]
    options = {"cu_seqlens": metadata.cu_seqlens, "backend": layer.backend}
    return selector_loss(q, *keys, metadata.sampled, layer.spec, **options)


def _ranking_keys(
    layer: Any, x: Tensor, k_cmp: Tensor, metadata: AttentionMetadata, port: Tensor | None
) -> Tensor:
    """Return k_cmp [B, N, K, D] with that gradient.

    `port` is that of k_cmp with φ = `pool`, that of the keys by token [B, T, K · D] with `mean`.
    """
    if port is not None and isinstance(layer.compress, PoolCompressor):
        return _WithGradientTo.apply(k_cmp.detach(), port)
    layout = PackedLayout(0, layer.kv_heads, layer.key_dim, 0, 1, first_set=1, mean=True)
    k = _project(layer, x.detach(), layout, metadata) if port is None else port
    if metadata.sequence is not None:
        layout = metadata.sequence.shard(layout)
    if layer.layout.mean:  # its gradient does not depend on the keys' values
        tables = *metadata.rotary, metadata.block_tokens, metadata.token_blocks
        q, gates, _, *others = RotaryPoolInputs(k, *tables, [*layout]).empty_outputs()
        known = None if port is None else (q, gates, k_cmp, *others)
        with nullcontext() if known is None else known_outputs(known):
            means = rotary_pool(k, layout, *tables, backend=layer.backend).compressed
        assert means is not None
        return means[0]
    k = k.unflatten(-1, (layout.kv_heads, layer.key_dim))
    if isinstance(layer.compress, PoolCompressor):
        return layer.compress.key(k, metadata.block_rotary, metadata, layer.backend)[0]
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
