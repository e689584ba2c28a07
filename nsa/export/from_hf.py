"""Models of Hugging Face's libraries, and dense ones of our own, as folders that a run begins from.

DIR/config.json, model.safetensors  ->  RUN/config.yaml, model.safetensors, tokenizer's files
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nsa.checkpoint.weights import find_weights, has_safetensors, read_weights
from nsa.engine.config import RunConfig
from nsa.engine.load_run import read_config
from nsa.model.config import AttentionConfig, ModelConfig

CONFIG = "config.json"
# What transformers writes beside a model for its tokenizer.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
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
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass
class Found:
    """A model as it lies in a folder."""

    config: RunConfig
    read: Callable[[], dict[str, Tensor]]  # its weights, by our names: seconds, or minutes
    tokenizer: list[Path]  # its files
    foreign: bool  # nothing beside it says how it was trained, and with which tokenizer
    becomes: str  # the kind of attention that it gets unless another is asked for


def read_model(place: Path) -> Found:
    """A folder of transformers' of our model_type or Llama's, or what `load_run` opens."""
    path = place / CONFIG
    if not path.is_file():
        found = find_weights(place)
        config = read_config(found)
        kind = config.model.attention.kind
        return Found(config, lambda: read_weights(found), _tokenizer_files(found), False, kind)
    if not has_safetensors(place):
        raise ValueError(
            f"{place}: there is a {CONFIG} and no model.safetensors; save the model with "
            "transformers' save_pretrained, which writes that"
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        kind = tree.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not the JSON of a configuration: {error}") from None
    if kind not in READERS:
        raise ValueError(
            f"{path}: model_type = {kind!r}; only {' and '.join(READERS)} can be imported"
        )
    model = READERS[kind](place, tree)
    if model.foreign and model.tokenizer:
        model.config.data.tokenizer = f"hf:{place}"
    return model


def _of_nsa(place: Path, tree: dict[str, Any]) -> Found:
    """An export, or what transformers made of one: then the run's settings are not beside it."""
    from nsa.model.hf_config import NSAConfig

    foreign = not (place / "config.yaml").is_file()
    config = RunConfig() if foreign else read_config(place)
    saved = NSAConfig(**tree)
    model = saved.model_config()
    model.attention.backend = config.model.attention.backend
    model.activation_checkpointing = config.model.activation_checkpointing
    config.model, config.data.seq_len = model, saved.max_position_embeddings
    kind = model.attention.kind
    return Found(config, lambda: read_weights(place), _tokenizer_files(place), foreign, kind)


def _of_llama(place: Path, tree: dict[str, Any]) -> Found:
    from transformers import LlamaConfig

    llama: Any = LlamaConfig.from_pretrained(place)
    for name, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if getattr(llama, name) != wanted:
            raise ValueError(
                f"{place / CONFIG}: {name} = {getattr(llama, name)!r}: this model knows "
                f"{wanted!r} alone, and computes something else with these weights"
            )
    rope = llama.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"{place / CONFIG}: rope_type = {rope['rope_type']!r}: this model turns by a base "
            "alone (model.rope_theta); take a checkpoint from before its context was extended"
        )
    config = RunConfig()
    config.data.seq_len = min(config.data.seq_len, llama.max_position_embeddings)
    config.model = ModelConfig(
        vocab_size=llama.vocab_size,
        layers=llama.num_hidden_layers,
        width=llama.hidden_size,
        heads=llama.num_attention_heads,
        kv_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        mlp_width=llama.intermediate_size,
        rope_theta=rope["rope_theta"],
        norm_eps=llama.rms_norm_eps,
        init_std=llama.initializer_range,
        attention=AttentionConfig(kind="dense"),
    )
    tied = llama.tie_word_embeddings

    def read() -> dict[str, Tensor]:
        return llama_weights(read_weights(place), place, tied)

    return Found(config, read, _tokenizer_files(place), True, "nsa")


def llama_weights(weights: dict[str, Tensor], place: Path, tied: bool) -> dict[str, Tensor]:
    """Llama's weights by our names. Its heads lie, and its rotary pairs turn, as ours do."""
    head = weights.pop(HEAD, None)
    if tied and head is not None:  # safetensors' save_model keeps one name of what is shared
        weights.setdefault(EMBEDDING, head)
    if EMBEDDING not in weights:
        raise ValueError(
            f"{place}: its files hold no model.{EMBEDDING}; save the model with transformers' "
            "save_pretrained"
        )
    if head is not None and not head.equal(weights[EMBEDDING]):
        raise ValueError(
            f"{place}: tie_word_embeddings = false: its head is not its embedding, and this model "
            "has one matrix for both; take a checkpoint that ties them"
        )
    found = {}
    for name, weight in weights.items():
        if name.endswith("rotary_emb.inv_freq"):  # of old ones: computed, not learned
            continue
        parts = LAYER.fullmatch(name)
        ours = {EMBEDDING: "embed.weight", "norm.weight": "norm.weight"}.get(name)
        if parts is not None and parts[2] in LLAMA_NAMES:
            ours = f"blocks.{parts[1]}.{LLAMA_NAMES[parts[2]]}.weight"
        if ours is None:
            raise ValueError(f"{place}: {name}: this model has no such weights")
        found[ours] = weight
    return found


READERS = {"nsa": _of_nsa, "llama": _of_llama}


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER if (folder / name).is_file()]
