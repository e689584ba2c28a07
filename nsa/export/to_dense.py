"""Plain dense models: config and weight names of transformers' Llama, Qwen2, Qwen3 and SmolLM3.

The inverse of what from_hf.py reads. A model with an index is written without it. A Mistral is a
Llama whose heads need not divide the width.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nsa.export.from_hf import LLAMA_NAMES
from nsa.model.config import ModelConfig
from nsa.model.hf_config import SHAPE, NSAConfig

BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
MODULES = {ours: theirs for theirs, ours in LLAMA_NAMES.items()}
OTHERS = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def dense_family(model: ModelConfig) -> str:
    """Return the model_type that has this model's options; raise a ValueError if none has."""
    attention = model.attention
    if attention.kind != "dense" and not attention.has_index:
        raise ValueError(
            f"--attention dense: model.attention.branches = {attention.branches!r}: a dense model "
            "has one set of keys and values; omit the flag"
        )
    options = {
        "qkv_bias": ("qwen2", model.qkv_bias),
        "qk_norm": ("qwen3", model.qk_norm),
        "no_rope_every": ("smollm3", bool(model.no_rope_every)),
    }
    families = {name: family for name, (family, used) in options.items() if used}
    if len(families) > 1:
        raise ValueError(
            f"--attention dense: no dense family has {' and '.join(families)}; omit the flag"
        )
    if (model.value_dim or model.head_dim) != model.head_dim:
        raise ValueError(
            f"--attention dense: model.value_dim = {model.value_dim}: dense families have values "
            f"of head_dim = {model.head_dim}; omit the flag"
        )
    return next(iter(families.values()), "mistral" if model.width % model.heads else "llama")


def dense_config(model: ModelConfig, **more: Any) -> PretrainedConfig:
    """Return transformers' config of a model that has a `dense_family`."""
    family = dense_family(model)
    rope: dict[str, Any] = {"rope_type": model.rope_type, "rope_theta": model.rope_theta}
    rope |= model.rope_extension or {}
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    same = {name: name for name in ("vocab_size", "head_dim")}
    names = {name: theirs for name, theirs in NSAConfig.attribute_map.items() if name in SHAPE}
    sizes = {theirs: getattr(model, ours) for ours, theirs in (names | same).items()}
    if every := model.no_rope_every:
        sizes["no_rope_layers"] = [int(n % every != 0) for n in range(1, model.layers + 1)]
    if family == "mistral":
        sizes["sliding_window"] = None
    sizes |= {"architectures": [ARCHITECTURES[family]], "rope_parameters": rope}
    return CONFIG_MAPPING[family](**sizes, **more)


def dense_name(name: str) -> str:
    """Return a weight's name in these families."""
    block = BLOCK.fullmatch(name)
    if block is None:
        return OTHERS.get(name, f"model.{name}")
    return f"model.layers.{block[1]}.{MODULES[block[2]]}.{block[3]}"
