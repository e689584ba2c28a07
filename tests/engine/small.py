"""The smallest config with every part: two layers, all three branches, each kind of parameter."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, build_parser, resolve_request
from nsa.engine.run_request import RunRequest
from nsa.spec import NSASpec


def small(checkpointing: str = "reentrant") -> RunConfig:
    """Return M7C's config with a toy model."""
    config = RunConfig()
    config.model.vocab_size, config.model.layers, config.model.width = 272, 2, 32
    config.model.heads, config.model.kv_heads, config.model.head_dim = 6, 2, 8
    config.model.mlp_width = 48
    config.model.attention.spec = NSASpec(8, 4, 8, 4, 1, 1, 12)
    config.model.activation_checkpointing = checkpointing
    return config


def small_request(*flags: str, profile: Callable[[], RunConfig] = small) -> RunRequest:
    """Resolve the flags of a recipe whose only profile is `small`, or another one."""
    recipe = Recipe("small", "", {"demo": profile})
    return resolve_request(recipe, build_parser(recipe).parse_args(["--profile=demo", *flags]))


def gpus(memory: float = 80e9) -> SimpleNamespace:
    """A stand-in for DeepSpeed's accelerator on a machine with two GPUs, the second smaller."""
    return SimpleNamespace(
        device_name=lambda: "cuda",
        device_count=lambda: 2,
        total_memory=lambda index: memory * (2 - index),
        supported_dtypes=lambda: [torch.bfloat16],
    )
