"""manifest.json: size and SHA-256 of every file of a checkpoint; the search for a valid one.

The manifest is written once all files are on disk, and the folder gets its name only after that.
So a folder without a valid manifest is unfinished, and a file that differs was damaged later.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from nsa.checkpoint.state_file import MAX_RANKS, STATE
from nsa.untrusted import matches, open_regular, parse_json, read_text

MANIFEST = "manifest.json"
NAME = re.compile(r"step(\d{8,})")
CHUNK = 4 * 2**20
MANIFEST_SHAPE = {
    **{"step": int, "ranks": int, "finite": bool, "time": (float, int), "sha256": str},
    "files": {str: {"bytes": int, "sha256": str}},
}


def checkpoint_name(step: int) -> str:
    return f"step{step:08d}"


def rng_file(rank: int) -> str:
    return f"rng_rank{rank}.pt"


def sync_and_hash(path: Path) -> dict[str, Any]:
    """Sync a file to disk and return its manifest entry: size and hash."""
    digest = _sha256(path, sync=True)
    return {"bytes": path.stat().st_size, "sha256": digest}


def manifest_text(content: dict[str, Any]) -> str:
    """Return the text of a manifest, with a hash of its content."""
    return json.dumps({**content, "sha256": _content_hash(content)}, indent=2) + "\n"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise a ValueError that names the problem with it."""
    try:
        content = parse_json(read_text(checkpoint / MANIFEST))
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error
    if not matches(content, MANIFEST_SHAPE):
        raise ValueError(f"{MANIFEST} cannot be read: it is not that of a checkpoint")
    if content.pop("sha256") != _content_hash(content):
        raise ValueError(f"{MANIFEST} was changed after it was written: its hash differs")
    if not 0 < content["ranks"] <= MAX_RANKS:
        raise ValueError(f"{MANIFEST} is that of {content['ranks']} ranks")
    match = NAME.match(checkpoint.name)  # step….universal, too
    if match and int(match[1]) != content["step"]:
        raise ValueError(f"{MANIFEST} is that of step {content['step']}")
    names = set(content["files"])
    missing = {STATE, *map(rng_file, range(content["ranks"]))} - names
    if missing:
        raise ValueError(f"{MANIFEST} does not name {min(missing)}")
    for name in sorted(names):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{MANIFEST} names {name}, outside its folder")
    return content


def find_problem(checkpoint: Path, *, hashes: bool = True) -> str | None:
    """Return the problem of a checkpoint, or None. Without `hashes`, compare sizes only."""
    try:
        files = read_manifest(checkpoint)["files"]
    except ValueError as error:
        return str(error)
    for name, entry in files.items():
        try:
            size = (checkpoint / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size:,} bytes, {MANIFEST} says {entry['bytes']:,}"
            if hashes and _sha256(checkpoint / name) != entry["sha256"]:
                return f"{name} has other content than was saved: its SHA-256 differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            return f"{name!r} cannot be read: {error}"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders named like a checkpoint, valid or not, newest first."""
    try:
        paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step")), reverse=True)


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint and a note on each one skipped; compare all hashes.

    The file `latest` is not read: it is for people and DeepSpeed's scripts.
    """
    notes: list[str] = []
    for path in list_checkpoints(folder):
        problem = find_problem(path)
        if problem is None:
            return path, notes
        notes.append(f"{path.name}: {problem}")
    return None, notes


def complete_by_size(folder: Path) -> list[Path]:
    """Return the checkpoints whose files have the right sizes, newest first."""
    return [path for path in list_checkpoints(folder) if not find_problem(path, hashes=False)]


def _sha256(path: Path, *, sync: bool = False) -> str:
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    view = memoryview(buffer)
    with open_regular(path) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _content_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
