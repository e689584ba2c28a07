"""Parameter count of a model, and floating-point operations per token."""

from __future__ import annotations

from nsa.model.config import ModelConfig


def parameter_sizes(config: ModelConfig) -> list[int]:
    """Return the size of each parameter without allocating it; a tied embedding counts once."""
    from nsa.model.language_model import meta_model

    return [parameter.numel() for parameter in meta_model(config).parameters()]


def parameter_count(config: ModelConfig) -> int:
    return sum(parameter_sizes(config))


def flops_per_token(config: ModelConfig, seq_len: int, *, dense_equivalent: bool = False) -> float:
    """Return forward and backward FLOPs per token, averaged over a document of `seq_len` tokens.

    A multiply-add is two FLOPs; a backward pass costs two forward passes. Recomputation, norms,
    softmax and the selector loss of a few sampled queries do not count. `dense_equivalent` counts
    the dense twin.
    """
    value_dim = config.value_dim or config.head_dim
    kv_size = config.kv_heads * (config.head_dim + value_dim)
    attention, spec = config.attention, config.attention.spec
    per_key = 2 * config.heads * (config.head_dim + value_dim)  # FLOPs
    # A layer's multiply-adds in the forward pass, without attention: q and o, SwiGLU, …
    products: float = config.heads * (config.head_dim + value_dim) * config.width
    products += 3 * config.width * config.mlp_width
    selection = 0.0  # a layer's FLOPs of both passes
    if dense_equivalent or attention.kind == "dense":
        products += kv_size * config.width
        keys = (seq_len + 1) / 2
    elif attention.has_index:
        products += kv_size * config.width
        visible = spec.mean_visible(seq_len)
        keys = visible["sel"]
        size = config.kv_heads * config.head_dim  # of the index's queries and of its keys
        # Two projections, each with a forward pass and the gradient of its weight alone.
        index = 4 * size * config.width
        if attention.compressor == "pool":
            index += size * config.head_dim * (3 if attention.selector_loss > 0 else 1)
        selection = 2 * index + 2 * size * visible["cmp"]
    else:
        branches = attention.branch_names
        products += kv_size * config.width * len(branches)
        products += len(branches) * config.heads * config.width  # gates
        blocks = spec.compressed_len(seq_len) / seq_len
        if attention.compressor == "mlp":
            products += kv_size * config.head_dim * (spec.block_len + 1) * blocks
        elif attention.compressor == "pool":
            products += config.kv_heads * (config.head_dim**2 + value_dim**2)
        visible = spec.mean_visible(seq_len)
        keys = sum(visible[branch] for branch in branches)
        if "sel" in branches:
            selection = 2 * config.heads * config.head_dim * visible["cmp"]
            if "cmp" not in branches:  # selection still needs its softmax, forward only
                selection += per_key * visible["cmp"]
    forward = config.layers * (2 * products + per_key * keys)
    forward += 2 * config.vocab_size * config.width  # head
    return 3 * forward + config.layers * selection
