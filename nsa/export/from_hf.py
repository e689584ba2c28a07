"""Hugging Face checkpoint reader: nsa and Llama models, and runs of this package, for `nsa import`.

DIR/config.json, model.safetensors  ->  RunConfig, weights under this package's names, tokenizer
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from nsa.checkpoint.weights import find_weights, has_safetensors, read_weights
from nsa.engine.config import RunConfig
from nsa.engine.load_run import read_config
from nsa.model.config import AttentionConfig, ModelConfig
from nsa.model.hf_config import NSAConfig
from nsa.untrusted import parse_json, read_text

CONFIG = "config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)
VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")  # each is enough for a tokenizer
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
}
LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
HEAD, EMBEDDING = "head.weight", "embed_tokens.weight"


@dataclass
class SourceModel:
    """A model to import."""

    config: RunConfig
    read_weights: Callable[[], dict[str, Tensor]]  # under this package's names; slow
    tokenizer_files: list[Path]
    default_attention: str  # attention kind of the import without --attention
    has_run_config: bool  # False: settings of training and tokenizer are unknown

    @property
    def has_tokenizer(self) -> bool:
        return any(file.name in VOCABULARIES for file in self.tokenizer_files)


def read_model(folder: Path) -> SourceModel:
    """Read a transformers folder of model_type nsa or llama, or what `load_run` accepts."""
    path = folder / CONFIG
    if not path.is_file():
        weights = find_weights(folder)
        config = read_config(weights)
        return _source_model(weights, config, config.model.attention.kind)
    if not has_safetensors(folder):
        raise ValueError(
            f"{folder}: {CONFIG} without model.safetensors; save the model with transformers' "
            "save_pretrained"
        )
    try:
        tree = parse_json(read_text(path))
        model_type = tree.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not the JSON of a configuration: {error}") from None
    if model_type not in ("nsa", "llama"):
        raise ValueError(f"{path}: model_type = {model_type!r}: must be nsa or llama")
    try:
        model = _read_nsa(folder, tree) if model_type == "nsa" else _read_llama(folder)
    except ValueError:
        raise
    except Exception as error:  # what transformers raises depends on the wrong value
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path}: not a configuration of {model_type}: {reason}") from error
    if not model.has_run_config:
        model.config.data.tokenizer = f"hf:{folder}"  # may be missing
    return model


def _read_nsa(folder: Path, tree: dict[str, Any]) -> SourceModel:
    """Read an export; transformers' save_pretrained drops its config.yaml."""
    has_run_config = (folder / "config.yaml").is_file()
    config = read_config(folder) if has_run_config else RunConfig()
    saved = NSAConfig(**tree)
    model = saved.model_config()
    model.attention.backend = config.model.attention.backend
    model.activation_checkpointing = config.model.activation_checkpointing
    config.model, config.data.seq_len = model, saved.max_position_embeddings
    return _source_model(folder, config, model.attention.kind, has_run_config)


def _read_llama(folder: Path) -> SourceModel:
    llama: Any = LlamaConfig.from_pretrained(folder)
    rope = {"rope_type": "default", **llama.rope_parameters}
    older = "the default; import a checkpoint from before its context was extended"
    for name, value, supported, only in (
        ("attention_bias", llama.attention_bias, False, "False"),
        ("mlp_bias", llama.mlp_bias, False, "False"),
        ("hidden_act", llama.hidden_act, "silu", "'silu'"),
        ("rope_type", rope["rope_type"], "default", older),
    ):
        if value != supported:
            raise ValueError(
                f"{folder / CONFIG}: {name} = {value!r}: this model supports only {only}"
            )
    config = RunConfig()
    config.data.seq_len = min(config.data.seq_len, llama.max_position_embeddings)
    config.model = ModelConfig(
        layers=llama.num_hidden_layers,
        width=llama.hidden_size,
        heads=llama.num_attention_heads,
        kv_heads=llama.num_key_value_heads,
        mlp_width=llama.intermediate_size,
        rope_theta=rope["rope_theta"],
        norm_eps=llama.rms_norm_eps,
        init_std=llama.initializer_range,
        vocab_size=llama.vocab_size,
        head_dim=llama.head_dim,
        tied_head=llama.tie_word_embeddings,
        attention=AttentionConfig(kind="dense"),
    )
    source = _source_model(folder, config, "nsa", has_run_config=False)
    source.read_weights = lambda: rename_llama_weights(
        read_weights(folder), folder, llama.tie_word_embeddings
    )
    return source


def rename_llama_weights(weights: dict[str, Tensor], folder: Path, tied: bool) -> dict[str, Tensor]:
    """Rename Llama's weights; their layouts (heads, RoPE pairs) are this model's."""
    head = weights.pop(HEAD) if tied and HEAD in weights else None
    if head is not None:  # safetensors' save_model stores shared weights under one name
        weights.setdefault(EMBEDDING, head)
    if EMBEDDING not in weights:
        raise ValueError(
            f"{folder}: has no weight model.{EMBEDDING}; save the model with transformers' "
            "save_pretrained"
        )
    if head is not None and not head.equal(weights[EMBEDDING]):
        raise ValueError(
            f"{folder}: tie_word_embeddings = true, but lm_head.weight differs from the "
            f"embedding; set it to false in {CONFIG}"
        )
    renamed = {}
    for name, weight in weights.items():
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints store this constant
            continue
        layer = LAYER.fullmatch(name)
        new_name = {EMBEDDING: "embed.weight"}.get(name)
        if name in (HEAD, "norm.weight"):
            new_name = name
        if layer is not None and layer[2] in LLAMA_NAMES:
            new_name = f"blocks.{layer[1]}.{LLAMA_NAMES[layer[2]]}.weight"
        if new_name is None:
            raise ValueError(f"{folder}: weight {name}: this model has no such weight")
        renamed[new_name] = weight
    return renamed


def _source_model(
    folder: Path, config: RunConfig, attention: str, has_run_config: bool = True
) -> SourceModel:
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return SourceModel(config, lambda: read_weights(folder), files, attention, has_run_config)
