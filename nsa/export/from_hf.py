"""Hugging Face checkpoint reader for `nsa import`: nsa models, Llama-like models, and runs.

DIR/config.json, model.safetensors  ->  RunConfig, weights under this package's names, tokenizer
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nsa.checkpoint.weights import find_weights, has_safetensors, read_weights
from nsa.engine.config import RunConfig
from nsa.engine.load_run import read_config
from nsa.model.config import ROPE_TYPES, AttentionConfig, ModelConfig
from nsa.model.hf_config import NSAConfig
from nsa.text import type_and_message
from nsa.untrusted import check_links, read_object, short_repr

CONFIG = "config.json"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")  # a tokenizer has one of them
LLAMA_NAMES = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
}
LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
# Architectures with this model's blocks; they differ in settings only.
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
UNSUPPORTED = {  # architectures, and what they have that this model lacks
    "gpt2": "learned positions and LayerNorm",
    "granite": "multipliers of embeddings, attention, residuals and logits",
    "gemma": "scaled embeddings and a gated GELU",
    "gemma2": "norms after attention and MLP, and capped logits",
    "gemma3_text": "norms after attention and MLP, and sliding windows",
    "olmo2": "norms after attention and MLP instead of before",
    "olmo3": "norms after attention and MLP instead of before",
    "phi3": "one matrix for q, k and v",
    "qwen3_moe": "experts",
    "mixtral": "experts",
}
HEAD, EMBEDDING = "head.weight", "embed_tokens.weight"


@dataclass
class SourceModel:
    config: RunConfig
    folder: Path  # of the weights
    hf_config: dict[str, Any] | None = None  # config.json of a folder without config.yaml

    @property
    def is_llama(self) -> bool:
        return self.hf_config is not None and self.hf_config["model_type"] != "nsa"

    def read_weights(self) -> dict[str, Tensor]:
        """Read the weights, under this package's names."""
        weights = read_weights(self.folder)
        if self.is_llama:
            weights = rename_llama_weights(weights, self.folder, self.config.model.tied_head)
        return weights

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in VOCABULARIES)


def read_model(folder: Path) -> SourceModel:
    """Read a transformers folder (nsa or LLAMAS) or a path for `load_run`, without the weights."""
    path = folder / CONFIG
    if not folder.exists():
        fix = "name a folder of transformers' save_pretrained, a run, a checkpoint or an export"
        if HUB_NAME.fullmatch(str(folder)):
            fix = "to import a model of the Hub, download it first: "
            fix += f"hf download {folder} --local-dir models/{folder.name}"
        raise ValueError(f"'{folder}': there is no such folder; {fix}")
    if not path.is_file():
        weights = find_weights(folder)
        check_links(weights)
        return SourceModel(read_config(weights), weights)
    if not has_safetensors(folder):
        raise ValueError(
            f"{folder}: {CONFIG} without model.safetensors; save the model with transformers' "
            "save_pretrained"
        )
    check_links(folder)
    tree = read_object(path)
    model_type = tree.get("model_type")
    if tree.get("configuration_files", [CONFIG]) != [CONFIG]:
        raise ValueError(
            f"{path}: configuration_files = {short_repr(tree['configuration_files'])}: "
            "transformers would read another file instead; remove this key"
        )
    if model_type not in ("nsa", *LLAMAS):
        other = UNSUPPORTED.get(str(model_type))  # a list, which a file may hold, has no hash
        reason = f"has {other}; " if other else ""
        raise ValueError(
            f"{path}: model_type = {short_repr(model_type)}: {reason}must be one of nsa, "
            f"{', '.join(LLAMAS)}"
        )
    try:
        model = _read_nsa(folder, tree) if model_type == "nsa" else _read_llama(folder, tree)
    except ValueError:
        raise
    except Exception as error:  # a value of the wrong type
        raise _bad_config(path, model_type, error) from error
    if model.hf_config is not None:
        model.config.data.tokenizer = f"hf:{folder}"  # `nsa import` checks that it has a tokenizer
    return model


def _bad_config(file: Path, model_type: str, error: Exception) -> ValueError:
    return ValueError(f"{file}: not a configuration of {model_type}: {type_and_message(error)}")


def parse_config(tree: dict[str, Any], file: Path) -> Any:
    """Return transformers' config object for `tree`, read from `file`; refuse all but LLAMAS."""
    model_type = tree.get("model_type")
    if model_type not in LLAMAS:
        raise ValueError(f"{file}: model_type = {model_type!r}: is none of {', '.join(LLAMAS)}")
    try:
        return CONFIG_MAPPING[model_type].from_dict(deepcopy(tree))
    except Exception as error:  # what transformers raises depends on the wrong value
        raise _bad_config(file, model_type, error) from error


def _read_nsa(folder: Path, tree: dict[str, Any]) -> SourceModel:
    """Read an export, or a copy by transformers' save_pretrained, which has no config.yaml."""
    has_run_config = (folder / "config.yaml").is_file()
    config = read_config(folder) if has_run_config else RunConfig()
    saved = NSAConfig(**tree)
    model = saved.model_config()
    if has_run_config:  # an export's config.json resets these
        model.attention.backend = config.model.attention.backend
        model.attention.selector_loss = config.model.attention.selector_loss
        model.activation_checkpointing = config.model.activation_checkpointing
    else:
        config.data.seq_len = saved.max_position_embeddings
    config.model = model
    return SourceModel(config, folder, None if has_run_config else tree)


def _read_llama(folder: Path, tree: dict[str, Any]) -> SourceModel:
    llama = parse_config(tree, folder / CONFIG)
    config = RunConfig()
    config.data.seq_len = min(config.data.seq_len, int(llama.max_position_embeddings))
    _check_supported(folder, llama, config.data.seq_len)
    model_type = tree["model_type"]
    heads = llama.num_attention_heads
    config.model = ModelConfig(
        layers=llama.num_hidden_layers,
        width=llama.hidden_size,
        heads=heads,
        kv_heads=llama.num_key_value_heads,
        mlp_width=llama.intermediate_size,
        **rope_settings(llama),
        no_rope_every=_no_rope_every(folder, llama),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        norm_eps=llama.rms_norm_eps,
        vocab_size=llama.vocab_size,
        head_dim=getattr(llama, "head_dim", None) or llama.hidden_size // heads,
        tied_head=llama.tie_word_embeddings,
        attention=AttentionConfig(kind="dense"),
    )
    return SourceModel(config, folder, tree)


def rope_settings(llama: Any) -> dict[str, Any]:
    """Return ModelConfig's settings of RoPE."""
    rope = {name: value for name, value in llama.rope_parameters.items() if value is not None}
    rope.pop("partial_rotary_factor", None)  # 1: the only supported value
    rope_type, theta = rope.pop("rope_type", "default"), rope.pop("rope_theta")
    extension = {name: float(value) for name, value in rope.items()} or None
    return {"rope_theta": theta, "rope_type": rope_type, "rope_extension": extension}


def _check_supported(folder: Path, llama: Any, seq_len: int) -> None:
    """Raise a ValueError that names the first setting that this model does not support."""
    rope = {"rope_type": "default", **llama.rope_parameters}
    window = getattr(llama, "sliding_window", None)
    if not getattr(llama, "use_sliding_window", True):
        window = None
    if window is not None and window >= seq_len:  # limits nothing in a training sequence
        window = None
    rope_types = f"one of {', '.join(ROPE_TYPES)}; import a checkpoint from before the extension"
    for name, value, supported, shown in (
        ("quantization_config", getattr(llama, "quantization_config", None), (None,), "None"),
        ("attention_bias", getattr(llama, "attention_bias", False), (False,), "False"),
        ("mlp_bias", getattr(llama, "mlp_bias", False), (False,), "False"),
        ("hidden_act", llama.hidden_act, ("silu",), "'silu'"),
        ("sliding_window", window, (None,), f"None, or {seq_len} and more"),
        ("attention_dropout", getattr(llama, "attention_dropout", 0.0), (0.0,), "0"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,), "1"),
        ("rope_type", rope["rope_type"], tuple(ROPE_TYPES), rope_types),
    ):
        if value not in supported:
            raise ValueError(
                f"{folder / CONFIG}: {name} = {short_repr(value)}: this model supports only {shown}"
            )


def _no_rope_every(folder: Path, llama: Any) -> int:
    """Return n if the layers n, 2n, … have no RoPE, 0 if all have it."""
    rotates = getattr(llama, "no_rope_layers", None) or []  # despite its name, 1: RoPE, 0: none
    if all(rotates):
        return 0
    every = rotates.index(0) + 1
    if list(rotates) != [int(number % every != 0) for number in range(1, len(rotates) + 1)]:
        raise ValueError(
            f"{folder / CONFIG}: no_rope_layers = {rotates}: this model supports only every n-th "
            "layer without RoPE"
        )
    return every


def rename_llama_weights(weights: dict[str, Tensor], folder: Path, tied: bool) -> dict[str, Tensor]:
    """Rename a Llama's weights; their layouts (heads, RoPE pairs) need no change."""
    if tied and HEAD in weights:
        head = weights.pop(HEAD)
        # safetensors' save_model stores a shared weight once, perhaps as the head.
        weights.setdefault(EMBEDDING, head)
        if not head.equal(weights[EMBEDDING]):
            raise ValueError(
                f"{folder}: tie_word_embeddings = true, but lm_head.weight differs from the "
                f"embedding; set it to false in {CONFIG}"
            )
    if EMBEDDING not in weights:
        raise ValueError(
            f"{folder}: has no weight model.{EMBEDDING}; save the model with transformers' "
            "save_pretrained"
        )
    renamed = {}
    for name, weight in weights.items():
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints store this constant
            continue
        layer = LAYER.fullmatch(name)
        if name == EMBEDDING:
            new_name = "embed.weight"
        elif name in (HEAD, "norm.weight"):
            new_name = name
        elif layer is not None and layer[2] in LLAMA_NAMES:
            new_name = f"blocks.{layer[1]}.{LLAMA_NAMES[layer[2]]}.{layer[3]}"
        else:
            raise ValueError(f"{folder}: weight {name}: this model has no such weight")
        renamed[new_name] = weight
    return renamed
