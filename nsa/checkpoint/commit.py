"""Atomic commit: the files of all ranks become one checkpoint with a manifest, or none.

.step00000010.partial/          the draft; removed by the next run after a crash
    *.pt state.json …           files of each rank, synced and hashed by that rank
    .part0 .part1               each rank's part of the manifest
    manifest.json               by rank 0, once all parts exist: size and SHA-256 of every file
step00000010/                   the same folder, renamed: from here on it is a checkpoint
latest                          written last

So a folder without a valid manifest is unfinished, and a file that differs from its entry in a
valid manifest was damaged later.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text, fsync_dir, publish
from nsa.checkpoint.state_file import MAX_RANKS, STATE
from nsa.text import first_line
from nsa.untrusted import matches, open_regular, parse_json, read_text

LATEST = "latest"
PARTIAL = ".partial"
FREE_SPACE = (
    "; free some space, or keep fewer checkpoints with checkpoint.keep (if `df -i` shows no "
    "free inodes: delete some files)"
)
ALLOW_WRITES = "; fix the folder's permissions or mount, or choose another folder"
FIXES = {  # by errno
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EFBIG: "; raise the limit of a file's size (`ulimit -f unlimited`)",
    errno.EROFS: ALLOW_WRITES,
    errno.EACCES: ALLOW_WRITES,
    errno.EPERM: ALLOW_WRITES,
}
MANIFEST = "manifest.json"
NAME = re.compile(r"step(\d{8,})")
CHUNK = 4 * 2**20
MANIFEST_SHAPE = {
    "step": int,
    "ranks": int,
    "time": (float, int),
    "sha256": str,
    "files": {str: {"bytes": int, "sha256": str}},
}


def checkpoint_name(step: int) -> str:
    return f"step{step:08d}"


def rng_file(rank: int) -> str:
    return f"rng_rank{rank}.pt"


def sync_and_hash(path: Path) -> dict[str, Any]:
    """Sync a file to disk and return its manifest entry: size and hash."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path, sync=True)}


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
        raise ValueError(f"{MANIFEST} cannot be read: it is no manifest of a checkpoint")
    if content.pop("sha256") != _content_hash(content):
        raise ValueError(f"{MANIFEST} was changed after it was written: its hash differs")
    if not 0 < content["ranks"] <= MAX_RANKS:
        raise ValueError(f"{MANIFEST} has ranks = {content['ranks']}: must be 1 to {MAX_RANKS}")
    match = NAME.match(checkpoint.name)  # step….universal too
    if match and int(match[1]) != content["step"]:
        raise ValueError(f"{MANIFEST} has step = {content['step']}: not the folder's")
    names = set(content["files"])
    if missing := {STATE, *map(rng_file, range(content["ranks"]))} - names:
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


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an error in the `with` block into a ValueError that names file, cause and fix.

    An error that names no file gets `path`.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as raised:
        # torch's writer raises a second error when it is closed: find the OSError before it.
        error: BaseException = raised
        while not isinstance(error, OSError) and error.__context__ is not None:
            error = error.__context__
        if isinstance(error, OSError):
            cause = f"{error.strerror or error}{FIXES.get(error.errno or 0, '')}"
            raise ValueError(f"{error.filename or path}: {cause}") from raised
        raise ValueError(f"{path}: {type(error).__name__}: {first_line(error)}") from raised


def draft_of(folder: Path, step: int) -> Path:
    return folder / f".{checkpoint_name(step)}{PARTIAL}"


def new_draft(folder: Path, step: int) -> Path:
    """Create an empty draft; remove an earlier one."""
    draft = draft_of(folder, step)
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    return draft


def remove_drafts(folder: Path) -> None:
    """Remove leftovers of a crash: drafts, half-removed checkpoints, drafts of `latest`."""
    for path in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*"):
        with contextlib.suppress(OSError):
            path.unlink()


def write_part(draft: Path, rank: int, names: Iterable[str]) -> None:
    """Sync and hash a rank's files, and write its part of the manifest."""
    files = {name: sync_and_hash(draft / name) for name in names}
    atomic_write_text(_part(draft, rank), json.dumps(files))


def commit(folder: Path, step: int, ranks: int, fields: dict[str, Any]) -> Path:
    """Turn a draft with the parts of all ranks into the checkpoint of `step`."""
    draft, checkpoint = draft_of(folder, step), folder / checkpoint_name(step)
    parts = [json.loads(_part(draft, rank).read_text(encoding="utf-8")) for rank in range(ranks)]
    manifest = {
        **fields,
        "step": step,
        "ranks": ranks,
        "time": time.time(),
        "files": {name: entry for part in parts for name, entry in sorted(part.items())},
    }
    for rank in range(ranks):
        _part(draft, rank).unlink()
    publish_checkpoint(draft, checkpoint, manifest)
    atomic_write_text(folder / LATEST, checkpoint.name)
    fsync_dir(folder)
    return checkpoint


def trial_commit(run_dir: Path) -> None:
    """Commit a checkpoint of a few bytes and remove it; raise a ValueError if that fails.

    Without this trial a run could train to its end and then fail to save.
    """
    folder = run_dir / "checkpoints"
    trial = (folder if folder.exists() else run_dir) / f".trial{PARTIAL}"
    shutil.rmtree(trial, ignore_errors=True)
    try:
        with explain_write_errors(trial):
            (new_draft(trial, 0) / STATE).write_text("{}")
            write_part(draft_of(trial, 0), 0, [STATE])
            commit(trial, 0, 1, {})
    except ValueError as error:
        raise ValueError(
            f"--run-dir {run_dir}: no checkpoint can be saved there: {error}"
        ) from error
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def publish_checkpoint(draft: Path, checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Write a draft's manifest, and rename the draft to `checkpoint`."""
    atomic_write_text(draft / MANIFEST, manifest_text(manifest))
    if checkpoint.exists():  # a damaged one
        remove(checkpoint)
    publish(draft, checkpoint)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints; 0 keeps all. Warn of failed removals.

    Damaged checkpoints are neither counted nor removed.
    """
    if keep == 0:
        return
    for path in complete_by_size(folder)[keep:]:
        try:
            remove(path)
        except OSError as error:
            warnings.warn(f"{path} could not be removed: {error.strerror}", stacklevel=2)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint and its universal form.

    Rename each folder first, so that a crash leaves no partial checkpoint.
    """
    for path in (checkpoint.with_name(f"{checkpoint.name}.universal"), checkpoint):
        if path.exists():
            removed = path.with_name(f".{path.name}.removed{PARTIAL}")
            if removed.exists():
                shutil.rmtree(removed)
            path.rename(removed)
            shutil.rmtree(removed)


def _part(draft: Path, rank: int) -> Path:
    return draft / f".part{rank}"
