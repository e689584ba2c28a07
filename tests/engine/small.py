"""The smallest run that has everything: two layers, all three branches, every kind of parameter."""

from __future__ import annotations

from nsa.engine.config import RunConfig
from nsa.spec import NSASpec


def small(checkpointing: str = "reentrant") -> RunConfig:
    """M7C with the numbers of a toy, for tests on two ranks."""
    config = RunConfig()
    config.model.vocab_size, config.model.layers, config.model.width = 272, 2, 32
    config.model.heads, config.model.kv_heads, config.model.head_dim = 6, 2, 8
    config.model.mlp_width = 48
    config.model.attention.spec = NSASpec(8, 4, 8, 4, 1, 1, 12)
    config.model.activation_checkpointing = checkpointing
    return config
