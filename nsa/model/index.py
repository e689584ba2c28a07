"""Index: ranks blocks for attention with one set of keys and values; the selector loss trains it.

    x, detached -> q -> RoPE                                             queries [B, T, Hkv, Dk]
                -> k -> φ over each compressed block -> RoPE at its end  keys [B, N, Hkv, Dk]
    q · k       -> the best blocks of each token and KV head, by select_blocks

The attention layer projects and rotates the index's queries and keys together with its own, in one
matrix product and one op. There is one index head per KV head. Its weights start as the layer's:
the mean of the group's query projections, and the key projection.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from nsa.model.attention_metadata import AttentionMetadata, apply_rotary
from nsa.model.compressor import BlockPool, cut_blocks
from nsa.model.config import ModelConfig


class Index(nn.Module):
    """Queries and keys that rank blocks; their gradient does not reach the layer's input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, size, bias = config.kv_heads, config.head_dim, config.qkv_bias
        self.q = nn.Linear(config.width, heads * size, bias=bias)
        self.k = nn.Linear(config.width, heads * size, bias=bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(size, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(size, eps=config.norm_eps)
        self.pool: BlockPool | None = None  # φ; None: the mean
        if config.attention.compressor == "pool":
            length = config.attention.spec.block_len
            self.pool = BlockPool(length, heads, size, config.attention.backend)

    def compress(self, k: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Pool the pre-RoPE keys of tokens [B, T, Hkv, Dk] to rotated keys of blocks [B, N, …]."""
        if self.pool is not None:
            return self.pool(k, metadata.block_rotary, metadata)
        assert metadata.block_rotary is not None
        return apply_rotary(cut_blocks(k, metadata).mean(2), metadata.block_rotary)


def index_start(attention: Mapping[str, Tensor], kv_heads: int) -> dict[str, Tensor]:
    """Return an index's initial weights, without φ's: φ starts as the mean.

    `attention` has the weights of the attention layer by their names within the layer.
    """
    size = len(attention["k.weight"]) // kv_heads
    start = {}
    for name, weight in attention.items():
        if name in ("q.weight", "q.bias"):  # the mean over each group's query heads
            start[name] = weight.unflatten(0, (kv_heads, -1, size)).mean(1).flatten(0, 1)
        elif name in ("k.weight", "k.bias", "q_norm.weight", "k_norm.weight"):
            start[name] = weight.clone()
    return start


def add_index(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return a dense model's weights with an index in each layer; the others stay as they are."""
    converted = dict(weights)
    layers = [
        name.removesuffix("k.weight") for name in weights if name.endswith(".attention.k.weight")
    ]
    for layer in layers:
        own = {name.removeprefix(layer): x for name, x in weights.items() if name.startswith(layer)}
        start = index_start(own, config.kv_heads)
        if config.attention.compressor == "pool":
            phi = BlockPool(config.attention.spec.block_len, config.kv_heads, config.head_dim)
            start |= {f"pool.{name}": x.to(own["k.weight"]) for name, x in phi.state_dict().items()}
        converted |= {f"{layer}index.{name}": x for name, x in start.items()}
    return converted


def without_index(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the dense model that attends to all tokens."""
    return {name: x for name, x in weights.items() if ".index." not in name}
