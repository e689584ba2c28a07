"""Files of a checkpoint that are read without an engine, and the search for a valid checkpoint.

manifest.json   size and SHA-256 of every file
state.json      training state, topology and tokenizer
rank<k>.json    state of one rank

The manifest is written once all files are on disk, and the folder gets its name only after that.
So a folder without a valid manifest is unfinished, and a file that differs was damaged later.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"step(\d{8,})")
CHUNK = 4 * 2**20
# DeepSpeed keeps the optimizer state complete in stage 0, sharded in stages 1 and 2, and sharded
# together with the weights in stage 3. It cannot load one of these layouts as another.
LAYOUT_OF_STAGE = {0: "0", 1: "1 or 2", 2: "1 or 2", 3: "3"}
WITH_MUON = "{} with Muon"  # neither can it read AdamW's state as Muon's
ANY = "any"  # `ranks` of a universal checkpoint, which loads on any number


def checkpoint_name(step: int) -> str:
    return f"step{step:08d}"


def rng_file(rank: int) -> str:
    return f"rng_rank{rank}.pt"


def rank_file(rank: int) -> str:
    return f"rank{rank}.json"


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
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        step, ranks = int(content["step"]), int(content["ranks"])
        for entry in content["files"].values():
            int(entry["bytes"]), str(entry["sha256"])
        names = set(content["files"])
        bool(content["finite"]), float(content["time"])
        intact = content.pop("sha256") == _content_hash(content)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if not intact:
        raise ValueError(f"{MANIFEST} was changed after it was written: its hash differs")
    match = NAME.match(checkpoint.name)
    if match and int(match[1]) != step:
        raise ValueError(f"{MANIFEST} is that of step {step}")
    for name in sorted({STATE, *map(rng_file, range(ranks))} - names):
        raise ValueError(f"{MANIFEST} does not name {name}")
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
    for name, entry in files.items():  # sizes first: this is cheap
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{error}"
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes, {MANIFEST} says {entry['bytes']:,}"
    for name, entry in files.items() if hashes else ():
        try:
            digest = _sha256(checkpoint / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if digest != entry["sha256"]:
            return f"{name} has other content than was saved: its SHA-256 differs"
    return None


def holds_intact(checkpoint: Path, names: Iterable[str]) -> bool:
    """Return whether a checkpoint holds these files as they were saved."""
    try:
        files = read_manifest(checkpoint)["files"]
        return all(_sha256(checkpoint / name) == files[name]["sha256"] for name in names)
    except (OSError, ValueError, KeyError):
        return False


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders named like a checkpoint, valid or not, newest first."""
    try:
        paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step")), reverse=True)


def newest_complete(folder: Path, *, finite: bool = False) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint and a note on each one skipped; compare all hashes.

    With `finite`, skip checkpoints with NaN or inf as well. The file `latest` is not read: it is
    for people and DeepSpeed's scripts.
    """
    notes: list[str] = []
    for path in list_checkpoints(folder):
        problem = find_problem(path)
        if problem is None and finite and not read_manifest(path)["finite"]:
            problem = "it holds numbers that are not finite"
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
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _content_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_train_state(checkpoint: Path) -> dict[str, Any]:
    return read_state_file(checkpoint)["state"]


def read_topology(checkpoint: Path) -> dict[str, Any]:
    """Return `layout`, `precision` and `ranks` of the run that saved the checkpoint."""
    return read_state_file(checkpoint)["saved_under"]


def read_tokenizer(checkpoint: Path) -> dict[str, str] | None:
    """Return `name` and `fingerprint` of the tokenizer; None if they are not recorded."""
    return read_state_file(checkpoint).get("tokenizer") if (checkpoint / STATE).is_file() else None


def read_rank_state(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """Return the state of one rank; None if it had none."""
    path = checkpoint / rank_file(rank)
    return json.loads(path.read_text()) if path.exists() else None


def read_state_file(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def check_loadable(checkpoint: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise a ValueError if DeepSpeed cannot load topology `saved` into `current`."""
    for key, name, fix in (
        ("layout", "ZeRO stage {}", "choose a DeepSpeed config of ZeRO stage {}"),
        ("precision", "precision {}", "set train.precision={}"),
        ("ranks", "world size {}", "start {} ranks, or add --universal to convert it"),
    ):
        if key == "ranks" and saved["layout"] == "0":
            continue  # rank 0 holds everything
        if saved[key] not in (current[key], ANY):
            raise ValueError(
                f"{checkpoint} was saved with {name.format(saved[key])}, and this run has "
                f"{name.format(current[key])}: DeepSpeed cannot load one as the other; "
                f"{fix.format(saved[key])}"
            )
