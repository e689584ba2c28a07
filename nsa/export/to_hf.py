"""Hugging Face export: a run as a folder that transformers loads, with or without this package.

With `dense` the run is written without its index, as a plain dense model that from_hf.py reads:
Llama, Mistral, Qwen2, Qwen3 or SmolLM3. An import also uses `output_folder` and `write_weights`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nsa.atomic_io import check_new_folder, draft_folder
from nsa.checkpoint.weights import SAFETENSORS
from nsa.data.tokenizer import ORIGIN, stop_ids
from nsa.dtypes import DTYPES
from nsa.engine.config import to_yaml
from nsa.engine.load_run import StoredRun, find_run, load_run
from nsa.export.from_hf import LLAMA_NAMES, parse_config
from nsa.export.hf_tokenizer import imported_files, write_tokenizer
from nsa.export.model_card import model_card
from nsa.export.origin import TOKEN_IDS, changes, find_origin, merge
from nsa.export.remote_code import AUTO_MAP, remote_code
from nsa.model.config import ModelConfig
from nsa.model.hf_config import SHAPE, NSAConfig
from nsa.model.index import without_index

BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
MODULES = {ours: theirs for theirs, ours in LLAMA_NAMES.items()}
OTHERS = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}


def export(path: Path, to: Path, dtype: str | None = None, dense: bool = False) -> Path:
    """Write a run, checkpoint or imported folder into `to`, completely or not at all.

    `dtype` "fp32" exports the optimizer's master weights; None keeps the trained dtype. `dense`:
    as a plain dense model, without an index and without this package's code and settings.
    """
    with output_folder(to) as draft:
        stored = find_run(path)
        if dense:
            dense_family(stored.config.model)  # refuses a model before its weights are read
        run = load_run(stored, device="cpu", dtype=None if dtype is None else DTYPES[dtype])
        _write(run, draft, dense)
    return to


def _write(run: StoredRun, folder: Path, dense: bool) -> None:
    weights = dict(run.model.state_dict())
    if dense:
        weights = without_index(weights)
    name_of = dense_name if dense else sparse_name
    write_weights({name_of(name): weight for name, weight in weights.items()}, folder)
    origin = find_origin(run.folder, run.config.train.start_from)
    # config.json of the imported folder: as a tree, and as transformers' config
    imported_tree = None if origin is None else origin.config
    imported = None if imported_tree is None else parse_config(imported_tree, run.folder / ORIGIN)
    fields = _fields(run, imported)
    texts = {"README.md": model_card(run, origin, dense)}
    if dense:
        config: PretrainedConfig = dense_config(run.config.model, **fields)
    else:
        config = NSAConfig.of(run.config.model, architectures=["NSAForCausalLM"], **fields)
        texts |= {"config.yaml": to_yaml(run.config), **remote_code()}
    tree = config.to_diff_dict()
    if imported_tree is not None:
        tree = merge(config, run.config.model, imported_tree, imported)
    if not dense:
        tree |= {"auto_map": AUTO_MAP}
    texts["config.json"] = _json(tree)
    generation = {name: fields[name] for name in TOKEN_IDS}
    if run.tokenizer is not None and len(stops := stop_ids(run.tokenizer)) > 1:
        generation["eos_token_id"] = stops  # a chat's turn may end with a token other than eos
    texts["generation_config.json"] = _json(GenerationConfig(**generation).to_diff_dict())
    if origin is not None:
        texts[ORIGIN] = origin.to_json()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    if run.tokenizer is not None:
        write_tokenizer(run.tokenizer, folder, run.config.data.seq_len)
    for line in changes(tree, imported_tree):
        print(f"config.json: {line}")


def _fields(run: StoredRun, imported: PretrainedConfig | None) -> dict[str, Any]:
    """Return dtype, positions and the ids for generate(); an imported model keeps its own.

    The bos of other models is the tokenizer's start token, or its eos if it has none.
    """
    positions, ids = run.config.data.seq_len, dict.fromkeys(TOKEN_IDS)
    if imported is not None:
        positions = max(positions, imported.max_position_embeddings)
    keeps_tokenizer = run.tokenizer is None or imported_files(run.tokenizer) != []
    if imported is not None and keeps_tokenizer:
        ids = {name: getattr(imported, name) for name in TOKEN_IDS}
    elif run.tokenizer is not None:
        eos, start = run.tokenizer.eos_id, run.tokenizer.start_id
        bos = eos if start is None else start
        pad = getattr(run.tokenizer, "pad_id", eos)
        ids = dict(zip(TOKEN_IDS, (bos, eos, pad), strict=True))
    return {"max_position_embeddings": positions, "dtype": run.model.embed.weight.dtype, **ids}


def _json(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


def dense_family(model: ModelConfig) -> str:
    """Return the model_type that has this model's options; raise a ValueError if none has."""
    attention = model.attention
    if attention.kind != "dense" and not attention.has_index:
        raise ValueError(
            f"--attention dense: model.attention.branches = {attention.branches!r}: a dense model "
            "has one set of keys and values; omit the flag"
        )
    # By the option that only this family has.
    families = {"qkv_bias": "qwen2", "qk_norm": "qwen3", "no_rope_every": "smollm3"}
    families = {name: family for name, family in families.items() if getattr(model, name)}
    if len(families) > 1:
        raise ValueError(
            f"--attention dense: no dense family has {' and '.join(families)}; omit the flag"
        )
    if model.value_dim not in (None, model.head_dim):
        raise ValueError(
            f"--attention dense: model.value_dim = {model.value_dim}: dense families have values "
            f"of head_dim = {model.head_dim}; omit the flag"
        )
    if families:
        return next(iter(families.values()))
    # transformers' Llama refuses a width that the number of heads does not divide.
    return "mistral" if model.width % model.heads else "llama"


def dense_config(model: ModelConfig, **more: Any) -> PretrainedConfig:
    """Return transformers' config of a model that has a `dense_family`."""
    family = dense_family(model)
    rope: dict[str, Any] = {"rope_type": model.rope_type, "rope_theta": model.rope_theta}
    rope |= model.rope_extension or {}
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    names = {ours: theirs for ours, theirs in NSAConfig.attribute_map.items() if ours in SHAPE}
    names |= {"vocab_size": "vocab_size", "head_dim": "head_dim"}
    sizes = {theirs: getattr(model, ours) for ours, theirs in names.items()}
    if every := model.no_rope_every:
        sizes["no_rope_layers"] = [int(n % every != 0) for n in range(1, model.layers + 1)]
    if family == "mistral":
        sizes["sliding_window"] = None  # transformers' default is 4,096
    sizes |= {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]], "rope_parameters": rope}
    return CONFIG_MAPPING[family](**sizes, **more)


def sparse_name(name: str) -> str:
    """Return a weight's name in `NSAForCausalLM`."""
    return "lm_head.weight" if name == "head.weight" else f"model.{name}"


def dense_name(name: str) -> str:
    """Return a weight's name in the dense families."""
    block = BLOCK.fullmatch(name)
    if block is None:
        return OTHERS.get(name, f"model.{name}")
    return f"model.layers.{block[1]}.{MODULES[block[2]]}.{block[3]}"


@contextlib.contextmanager
def output_folder(to: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to `to` at the end, or delete it after an error."""
    check_new_folder(to)
    target = Path(os.path.realpath(to))  # resolves "." and links
    if target.exists() and (target.is_mount() or target == Path.cwd()):
        raise ValueError(f"--to {to}: cannot be replaced; name a new folder inside it")
    with draft_folder(target) as draft:
        yield draft
        for file in draft.iterdir():
            file.chmod(draft.stat().st_mode & 0o666)  # safetensors restricts its file to the owner


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write model.safetensors; raise OSError if the disk is full, as for other files."""
    try:
        save_file(weights, folder / SAFETENSORS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder.parent}: the weights cannot be written: {error}") from None
