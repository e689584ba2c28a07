"""Plain Llama: config and weight names of a dense model for transformers' LlamaForCausalLM.

The inverse of what from_hf.py reads of model_type llama.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import LlamaConfig

from nsa.export.from_hf import LLAMA_NAMES
from nsa.model.config import ModelConfig
from nsa.model.hf_config import SHAPE, NSAConfig

BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.weight")
MODULES = {ours: theirs for theirs, ours in LLAMA_NAMES.items()}
OTHERS = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}


def check_llama(model: ModelConfig) -> None:
    """Raise a ValueError that names the first setting that a Llama cannot have."""
    for name, value, only in (
        ("attention.kind", model.attention.kind, "dense"),
        ("qkv_bias", model.qkv_bias, False),
        ("qk_norm", model.qk_norm, False),
        ("no_rope_every", model.no_rope_every, 0),
        ("value_dim", model.value_dim or model.head_dim, model.head_dim),
    ):
        if value != only:
            raise ValueError(
                f"--attention dense: model.{name} = {value!r}: a Llama has only {only!r}; omit the "
                "flag"
            )
    if model.width % model.heads:
        raise ValueError(
            f"--attention dense: model.width = {model.width}: LlamaConfig requires a multiple of "
            f"model.heads = {model.heads}; omit the flag, or train with --set model.heads=4"
        )


def llama_config(model: ModelConfig, **more: Any) -> LlamaConfig:
    """Return the config of a model that passes `check_llama`."""
    rope: dict[str, Any] = {"rope_type": model.rope_type, "rope_theta": model.rope_theta}
    rope |= model.rope_extension or {}
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    same = {name: name for name in ("vocab_size", "head_dim")}
    names = {name: theirs for name, theirs in NSAConfig.attribute_map.items() if name in SHAPE}
    sizes = {theirs: getattr(model, ours) for ours, theirs in (names | same).items()}
    return LlamaConfig(architectures=["LlamaForCausalLM"], rope_parameters=rope, **sizes, **more)


def llama_name(name: str) -> str:
    """Return a weight's name in a Llama."""
    block = BLOCK.fullmatch(name)
    if block is None:
        return OTHERS.get(name, f"model.{name}")
    return f"model.layers.{block[1]}.{MODULES[block[2]]}.weight"
