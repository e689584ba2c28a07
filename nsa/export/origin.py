"""Origin of an imported model: its name and license, which the card of an export names."""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import ModelCard

from nsa.data.tokenizer import ORIGIN
from nsa.untrusted import matches, parse_json, printable, read_text

Origin = dict[str, str | None]  # name and license
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write_origin(source: Path, folder: Path) -> None:
    """Record the name and license of a transformers folder."""
    try:
        saved = parse_json(read_text(source / "config.json")).get("_name_or_path", "")
    except ValueError:
        saved = ""
    name = saved if HUB_NAME.fullmatch(str(saved)) else source.resolve().name
    origin = {"name": name, "license": _license(source)}
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")


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
    """Return name and license of the model that a run started from, if it was imported."""
    for folder in (run_folder, *([Path(start_from)] if start_from else [])):
        file = folder / ORIGIN
        if file.is_file():
            origin = parse_json(read_text(file))
            if matches(origin, {"name": str, "license": (str, type(None))}):
                return {"name": printable(origin["name"]), "license": origin["license"]}
    return None
