"""What a checkpoint's folder must hold, byte for byte, and whether it still does.

`manifest.json` is written once all files are on disk, and the folder gets its name only after
that. So a folder without a good manifest was never finished, and one that differs from its
manifest was damaged later.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"step(\d{8,})")  # anything else in the folder of checkpoints is not one
CHUNK = 4 * 2**20


def checkpoint_name(step: int) -> str:
    """The folder that a step's checkpoint lies in."""
    return f"step{step:08d}"


def seal(path: Path) -> dict[str, Any]:
    """Bring one file to disk; returns its size and hash, as a manifest holds them."""
    digest = _hash(path, to_disk=True)
    return {"bytes": path.stat().st_size, "sha256": digest}


def manifest_text(content: dict[str, Any]) -> str:
    """A manifest as it is written, with a hash of itself: its own damage is found as well."""
    return json.dumps({**content, "sha256": _own_hash(content)}, indent=2) + "\n"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's manifest; raises a ValueError that says what is wrong with it."""
    path = checkpoint / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        named = int(content["step"]), int(content["ranks"])
        files = {
            name: (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in content["files"].items()
        }
        bool(content["finite"]), float(content["time"])
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    own = content.pop("sha256", None)
    if own != _own_hash(content):
        raise ValueError(f"{MANIFEST} was changed after it was written: its own hash differs")
    match = NAME.match(checkpoint.name)
    if match and int(match[1]) != named[0]:
        raise ValueError(f"{MANIFEST} is that of step {named[0]}")
    needed = {STATE, *(rng_file(rank) for rank in range(named[1]))}
    absent = sorted(needed - set(files))
    outside = sorted(name for name in files if not _stays_inside(name))
    if absent or outside:
        what = f"does not name {absent[0]}" if absent else f"names {outside[0]}, outside its folder"
        raise ValueError(f"{MANIFEST} {what}")
    return content


def find_problem(checkpoint: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint; None where it is whole. Without `hashes`: sizes only."""
    try:
        files = read_manifest(checkpoint)["files"]
    except ValueError as error:
        return str(error)
    for name, entry in files.items():  # the cheap look at all files comes first
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{error}"
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes, {MANIFEST} says {entry['bytes']:,}"
    for name, entry in files.items() if hashes else ():
        try:
            same = _hash(checkpoint / name) == entry["sha256"]
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if not same:
            return f"{name} has other content than was saved: its SHA-256 differs"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders that are named as checkpoints, whole or not, the newest first."""
    try:
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step")), reverse=True)


def newest_complete(folder: Path, *, finite: bool = False) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, read through and compared, and a note on each passed over.

    `latest` is a hint for people and DeepSpeed's scripts, and is not asked. With `finite`, one that
    holds NaN or inf is passed over as well.
    """
    notes: list[str] = []
    for path in list_checkpoints(folder):
        wrong = find_problem(path)
        if wrong is None and finite and not read_manifest(path)["finite"]:
            wrong = "it holds numbers that are not finite"
        if wrong is None:
            return path, notes
        notes.append(f"{path.name}: {wrong}")
    return None, notes


def newest_by_size(folder: Path) -> Path | None:
    """The newest that looks whole at a glance: what a message may name without reading it all."""
    return next(
        (path for path in list_checkpoints(folder) if not find_problem(path, hashes=False)), None
    )


def rng_file(rank: int) -> str:
    """The file of one rank's random number generators."""
    return f"rng_rank{rank}.pt"


def rank_file(rank: int) -> str:
    """The file of what one rank alone remembers."""
    return f"rank{rank}.json"


def _hash(path: Path, *, to_disk: bool = False) -> str:
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        if to_disk:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _own_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _stays_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts
