"""The selector loss of a layer: its gradient reaches φ and the keys' projection alone.

The keys that the loss ranks by are those of the compressed branch, projected and compressed again
from detached hidden states: a twelfth of M7C's projection, and φ.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention_metadata import AttentionMetadata, apply_rotary
from nsa.model.compressor import PoolCompressor
from nsa.model.fused import head_norm, is_plain
from nsa.ops import PackedLayout, rotary_pool, selector_loss


def ranking_loss(
    layer: Any, x: Tensor, q: Tensor, k_sel: Tensor, metadata: AttentionMetadata
) -> tuple[Tensor, Tensor]:
    """Return an NSAttention layer's selector loss and target; the gradient does not reach x.

    So it trains only the ranking, not the hidden states that other layers read.
    """
    assert metadata.sampled is not None
    k_cmp = ranking_keys(layer, x, metadata)
    options = {"cu_seqlens": metadata.cu_seqlens, "backend": layer.backend}
    return selector_loss(q, k_cmp, k_sel, metadata.sampled, layer.spec, **options)


def ranking_keys(layer: Any, x: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Return the compressed branch's keys [B, N, K, D], as a function of detached x."""
    layout = PackedLayout(0, layer.kv_heads, layer.key_dim, 0, 1, first_set=1, mean=True)
    k = _project(layer, x.detach())
    if metadata.sequence is not None:
        k = metadata.sequence.tokens_to_heads(k, layout)
        layout = metadata.sequence.shard(layout)
    if layer.layout.mean:
        tables = *metadata.rotary, metadata.block_tokens, metadata.token_blocks
        means = rotary_pool(k, layout, *tables, backend=layer.backend).compressed
        assert means is not None
        return means[0]
    k = k.unflatten(-1, (layout.kv_heads, layer.key_dim))
    if isinstance(layer.compress, PoolCompressor):
        return layer.compress.key(k, metadata.block_rotary, metadata, layer.backend)
    if layer.compress.rotate_first:
        k = apply_rotary(k, metadata.rotary)
    return layer.compress(k, k.new_zeros(*k.shape[:3], layer.value_dim), metadata)[0]


def _project(layer: Any, x: Tensor) -> Tensor:
    """Project x to the keys that φ reads, the first rows of the projection."""
    rows = layer.kv_heads * layer.key_dim
    bias = None if layer.k.bias is None else layer.k.bias[:rows]
    plain = is_plain(layer.k, nn.Linear)
    k = F.linear(x, layer.k.weight[:rows], bias) if plain else layer.k(x)[..., :rows]
    return head_norm(k, layer.k_norm) if layer.config.qk_norm else k
