"""How many parameters a model has and how many floating-point operations a token costs."""

from __future__ import annotations

import torch

from nsa.model.config import ModelConfig


def parameter_count(config: ModelConfig) -> int:
    """All parameters; the embedding, which is also the head, counts once. Allocates nothing."""
    from nsa.model.language_model import LanguageModel

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(config).parameters())


def flops_per_token(config: ModelConfig, seq_len: int, *, dense_equivalent: bool = False) -> float:
    """Forward and backward operations a token, averaged over a document of `seq_len` tokens.

    As executed by this model's attention; with `dense_equivalent` as its dense twin would execute.
    A multiplication and an addition are two; a backward pass costs two forward passes. What
    activation checkpointing recomputes is not counted, norms and softmax neither.
    """
    value_dim = config.value_dim or config.head_dim
    kv_size = config.kv_heads * (config.head_dim + value_dim)
    attention, mlp = config.attention, 3 * config.width * config.mlp_width
    per_key = 2 * config.heads * (config.head_dim + value_dim)
    products: float = config.heads * (config.head_dim + value_dim) * config.width  # q and o
    choosing = 0.0  # no gradient passes through it: counted once
    if dense_equivalent or attention.kind == "dense":
        products += kv_size * config.width
        keys = (seq_len + 1) / 2
    else:
        spec, branches = attention.spec, attention.branch_names
        products += kv_size * config.width * (1 if attention.shared_kv else len(branches))
        products += len(branches) * config.heads * config.width
        blocks = spec.compressed_len(seq_len) / seq_len
        products += _compressor_products(config, value_dim) * blocks
        visible = {
            "cmp": sum(map(spec.visible_compressed, range(seq_len))) / seq_len,
            "sel": sum(map(spec.visible_selected, range(seq_len))) / seq_len,
            "win": sum(map(spec.visible_window, range(seq_len))) / seq_len,
        }
        keys = sum(visible[branch] for branch in branches)
        if "sel" in branches:
            choosing = 2 * config.heads * config.head_dim * visible["cmp"]
            if "cmp" not in branches:  # its softmax is computed all the same, forward alone
                choosing += per_key * visible["cmp"]
    forward = config.layers * (2 * (products + mlp) + per_key * keys)
    forward += 2 * config.vocab_size * config.width
    return 3 * forward + config.layers * choosing


def _compressor_products(config: ModelConfig, value_dim: int) -> int:
    """Multiplications of φ for one compressed block, all KV heads."""
    if config.attention.compressor == "mean":
        return 0
    hidden = config.attention.compressor_hidden or config.head_dim
    length = config.attention.spec.block_len
    return config.kv_heads * hidden * (length + 1) * (config.head_dim + value_dim)
