"""A model small enough to measure, in which no part dominates memory."""

from __future__ import annotations

from nsa.engine.config import RunConfig
from nsa.spec import NSASpec

BUCKET = 2**17  # elements; small relative to the model, as for M7C


def toy(checkpointing: str = "none", kind: str = "dense") -> RunConfig:
    """Dense by default: on a CPU, sparse attention's tiles would dominate."""
    config = RunConfig()
    model, attention = config.model, config.model.attention
    model.vocab_size, model.layers, model.width, model.mlp_width = 768, 3, 192, 544
    model.heads, model.kv_heads, model.head_dim = 6, 2, 32
    attention.spec = NSASpec(16, 8, 16, 4, 1, 1, 64)
    attention.kind, attention.backend = kind, "blockwise"
    model.activation_checkpointing = checkpointing
    config.data.seq_len = 160  # so that activations dominate
    config.train.micro_batch, config.train.accumulation = 1, 2
    return config
