"""Origin of an imported model: its name, license and config.json, which its exports keep."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from nsa.data.tokenizer import ORIGIN
from nsa.text import printable
from nsa.untrusted import matches, read_object, read_text

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Origin:
    name: str
    license: str | None
    config: dict[str, Any] | None  # a Llama's config.json; imports of earlier versions lack it

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
    except ValueError:
        return None
    value = stated.get("license")
    return value if isinstance(value, str) else None


def find_origin(run_folder: Path, start_from: str | None) -> Origin | None:
    """Return the origin of the model that a run started from, if it was imported."""
    for folder in (run_folder, *([Path(start_from)] if start_from else [])):
        file = folder / ORIGIN
        if file.is_file():
            saved = {"config": None} | read_object(file)
            shape = {"name": str, "license": (str, type(None)), "config": (dict, type(None))}
            if matches(saved, shape):
                return Origin(printable(saved["name"]), saved["license"], saved["config"])
    return None
