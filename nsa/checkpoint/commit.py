"""Atomic commit: the files of all ranks become one checkpoint, or none.

    .step00000010.partial/          the draft; removed by the next run after a crash
        *.pt state.json …           files of each rank, synced and hashed by that rank
        .part0 .part1               each rank's part of the manifest, or its error
        manifest.json               by rank 0, once all parts exist
    step00000010/                   the same folder, renamed: from here on it is a checkpoint
    latest                          written last

Ranks wait for each other through files, so that no collective interferes with those of training.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text, fsync_dir
from nsa.checkpoint.manifest import (
    MANIFEST,
    checkpoint_name,
    complete_by_size,
    manifest_text,
    read_manifest,
    sync_and_hash,
)
from nsa.text import first_line

LATEST = "latest"
POLL_SECONDS = 0.02  # between two checks for the other ranks' parts
PARTIAL = ".partial"
FULL = (
    "; free some space, or keep fewer checkpoints with checkpoint.keep (if `df -i` shows no "
    "free inodes: delete some files)"
)
REFUSED = "; fix the folder's permissions or mount, or choose another folder"
FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), REFUSED),
}


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an error of the block into a ValueError that names file (or `path`), cause and fix."""
    try:
        yield
    except ValueError:
        raise
    except Exception as raised:
        error: BaseException = raised
        while not isinstance(error, OSError) and error.__context__ is not None:
            error = error.__context__  # torch's writer raises a second error when it is closed
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
    """Remove leftovers of a crash: drafts, checkpoints being removed, drafts of `latest`."""
    for path in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*"):
        with contextlib.suppress(OSError):
            path.unlink()


def write_part(draft: Path, rank: int, names: Iterable[str], finite: bool) -> None:
    """Sync and hash a rank's files, and write its part of the manifest."""
    files = {name: sync_and_hash(draft / name) for name in names}
    atomic_write_text(_part(draft, rank), json.dumps({"files": files, "finite": finite}))


def write_failure(draft: Path, rank: int, names: Iterable[str], reason: str) -> None:
    """Remove a rank's files, which frees their space, and report its error to rank 0."""
    for name in names:
        with contextlib.suppress(OSError):
            (draft / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # if this fails as well, the next barrier reports it
        atomic_write_text(_part(draft, rank), json.dumps({"error": reason}))


def wait_for_parts(draft: Path, ranks: int, abort: threading.Event) -> list[dict[str, Any]]:
    """Return every rank's part; raise a ValueError with the errors of ranks that failed."""
    parts: dict[int, dict[str, Any]] = {}
    while len(parts) < ranks:
        if abort.is_set():
            raise ValueError("another rank failed")
        for rank in set(range(ranks)) - set(parts):
            with contextlib.suppress(FileNotFoundError):
                parts[rank] = json.loads(_part(draft, rank).read_text(encoding="utf-8"))
        if len(parts) < ranks:
            time.sleep(POLL_SECONDS)
    errors = [parts[rank]["error"] for rank in range(ranks) if "error" in parts[rank]]
    if errors:
        raise ValueError("; ".join(dict.fromkeys(errors)))
    return [parts[rank] for rank in range(ranks)]


def commit(folder: Path, step: int, parts: list[dict[str, Any]], fields: dict[str, Any]) -> Path:
    """Turn a finished draft into the checkpoint of `step`."""
    draft, checkpoint = draft_of(folder, step), folder / checkpoint_name(step)
    manifest = {
        **fields,
        "step": step,
        "ranks": len(parts),
        "time": time.time(),
        "finite": all(part["finite"] for part in parts),
        "files": {name: entry for part in parts for name, entry in sorted(part["files"].items())},
    }
    for rank in range(len(parts)):
        _part(draft, rank).unlink()
    publish(draft, checkpoint, manifest)
    atomic_write_text(folder / LATEST, checkpoint.name)
    fsync_dir(folder)
    return checkpoint


def publish(draft: Path, checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a draft whose files are synced, and give the draft its name."""
    atomic_write_text(draft / MANIFEST, manifest_text(manifest))
    for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
        fsync_dir(folder)
    if checkpoint.exists():  # damaged, or from before a rollback
        remove(checkpoint)
    draft.rename(checkpoint)
    fsync_dir(checkpoint.parent)


def prune(folder: Path, keep: int, keep_hours: float, now: float) -> None:
    """Remove checkpoints beyond the `keep` newest or older than `keep_hours`; 0: no limit.

    The newest stays, and so does the newest without NaN or inf. Damaged ones stay and do not count.
    Warn of failed removals.
    """
    paths = complete_by_size(folder)
    manifests = {path: read_manifest(path) for path in paths}
    protected = {*paths[:1], *[path for path in paths if manifests[path]["finite"]][:1]}
    for index, path in enumerate(paths):
        too_many = keep and index >= keep
        too_old = keep_hours and now - manifests[path]["time"] > keep_hours * 3600
        if path not in protected and (too_many or too_old):
            try:
                remove(path)
            except OSError as error:
                warnings.warn(f"{path} could not be removed: {error.strerror}", stacklevel=2)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint and its universal form; rename first, so that a crash leaves no half."""
    for path in (checkpoint.with_name(f"{checkpoint.name}.universal"), checkpoint):
        if path.exists():
            removed = path.with_name(f".{path.name}.removed{PARTIAL}")
            if removed.exists():
                shutil.rmtree(removed)
            path.rename(removed)
            shutil.rmtree(removed)


def _part(draft: Path, rank: int) -> Path:
    return draft / f".part{rank}"
