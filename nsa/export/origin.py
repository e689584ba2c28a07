"""Origin of an imported model: its name, license and config.json.

Exports keep the name, the license, and the fields of config.json that training did not change:
servers and converters read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import PretrainedConfig
from yaml import YAMLError

from nsa.data.tokenizer import ORIGIN
from nsa.export.from_hf import HUB_NAME, rope_settings
from nsa.model.config import ModelConfig
from nsa.model.hf_config import SHAPE, NSAConfig
from nsa.system import user_path
from nsa.text import printable
from nsa.untrusted import matches, read_object, read_text, short_repr

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields that describe the exported model itself.
OWN = {NSAConfig.attribute_map.get(name, name) for name in SHAPE} | {
    *("model_type", "architectures", "dtype", "transformers_version", "max_position_embeddings"),
    *TOKEN_IDS,
}
# Fields about the source's files, machine and code, which an export does not have.
DROPPED = {
    *("_name_or_path", "auto_map", "configuration_files", "torch_dtype", "attn_implementation"),
    *("_attn_implementation", "experts_implementation", "_experts_implementation"),
}
ROPE = {"rope_parameters", "rope_scaling", "rope_theta"}
OF_MODEL_TYPE = {  # fields that mean nothing, or something else, in another architecture
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("no_rope_layers", "no_rope_layer_interval", "rope_scaling"),
}


@dataclass(frozen=True)
class Origin:
    name: str
    license: str | None
    config: dict[str, Any] | None  # None: an NSA model, or an import of an earlier version

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def write_origin(source: Path, config: dict[str, Any], folder: Path) -> None:
    """Record the name, license and config.json of a transformers folder."""
    saved = str(config.get("_name_or_path", ""))
    name = saved if HUB_NAME.fullmatch(saved) else source.resolve().name
    origin = Origin(name, _license(source), None if config["model_type"] == "nsa" else config)
    (folder / ORIGIN).write_text(origin.to_json(), encoding="utf-8")


def _license(source: Path) -> str | None:
    """Return the license that the folder's README.md states in its metadata."""
    if not (source / "README.md").is_file():
        return None
    try:
        stated = ModelCard(read_text(source / "README.md"), ignore_metadata_errors=True).data
    except (ValueError, YAMLError):
        return None
    value = stated.get("license")
    return value if isinstance(value, str) else None


def find_origin(run_folder: Path, start_from: str | None) -> Origin | None:
    """Return the origin of the model that a run started from, if it was imported."""
    folders = [run_folder, user_path(start_from)] if start_from else [run_folder]
    for folder in folders:
        if (file := folder / ORIGIN).is_file():
            saved = {"config": None} | read_object(file)
            shape = {"name": str, "license": (str, type(None)), "config": (dict, type(None))}
            if matches(saved, shape):
                return Origin(printable(saved["name"]), saved["license"], saved["config"])
    return None


def merge(
    config: PretrainedConfig, model: ModelConfig, source: dict[str, Any], original: PretrainedConfig
) -> dict[str, Any]:
    """Return an export's config.json: the model's own fields, and the other fields of the source.

    `config` and `original` are transformers' configs of `model` and of `source`.
    """
    dropped = set(DROPPED)
    if config.model_type != source["model_type"]:
        dropped |= OF_MODEL_TYPE
    if any(getattr(model, name) != value for name, value in rope_settings(original).items()):
        dropped |= ROPE
    kept = {name: value for name, value in source.items() if name not in dropped}
    own = {name: value for name, value in config.to_dict().items() if name in OWN}
    return config.to_diff_dict() | kept | own


def changes(tree: dict[str, Any], source: dict[str, Any] | None) -> Iterator[str]:
    """Yield a line for each field of the source that differs in an export's config.json."""
    for name, old in sorted((source or {}).items()):
        new = tree.get("dtype" if name == "torch_dtype" else name)
        if new != old and name not in ("transformers_version", "_name_or_path"):
            yield f"{printable(name)} = {short_repr(new)}, was {short_repr(old)}"
