"""Atomic commit: the files of all ranks become one checkpoint, or none.

.step00000010.partial/          the draft; removed by the next run after a crash
    *.pt state.json …           files of each rank, synced and hashed by that rank
    .part0 .part1               each rank's part of the manifest
    manifest.json               by rank 0, once all parts exist
step00000010/                   the same folder, renamed: from here on it is a checkpoint
latest                          written last
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
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
from nsa.checkpoint.state_file import STATE
from nsa.text import first_line

LATEST = "latest"
PARTIAL = ".partial"
FULL = (
    "; free some space, or keep fewer checkpoints with checkpoint.keep (if `df -i` shows no "
    "free inodes: delete some files)"
)
REFUSED = "; fix the folder's permissions or mount, or choose another folder"
FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), FULL),
    errno.EFBIG: "; raise the limit of a file's size (`ulimit -f unlimited`)",
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


def commit(folder: Path, step: int, ranks: int, fields: dict[str, Any]) -> Path:
    """Turn a draft with the parts of all ranks into the checkpoint of `step`."""
    draft, checkpoint = draft_of(folder, step), folder / checkpoint_name(step)
    parts = [json.loads(_part(draft, rank).read_text(encoding="utf-8")) for rank in range(ranks)]
    manifest = {
        **fields,
        "step": step,
        "ranks": ranks,
        "time": time.time(),
        "finite": all(part["finite"] for part in parts),
        "files": {name: entry for part in parts for name, entry in sorted(part["files"].items())},
    }
    for rank in range(ranks):
        _part(draft, rank).unlink()
    publish(draft, checkpoint, manifest)
    atomic_write_text(folder / LATEST, checkpoint.name)
    fsync_dir(folder)
    return checkpoint


def trial_commit(run_dir: Path) -> None:
    """Commit a checkpoint of a few bytes and remove it; raise a ValueError if the disk cannot.

    Else a run would train to its end and save nothing.
    """
    folder = run_dir / "checkpoints"
    trial = (folder if folder.exists() else run_dir) / f".trial{PARTIAL}"
    shutil.rmtree(trial, ignore_errors=True)
    try:
        with write_errors(trial):
            (new_draft(trial, 0) / STATE).write_text("{}")
            write_part(draft_of(trial, 0), 0, [STATE], finite=True)
            commit(trial, 0, 1, {})
    except ValueError as error:
        raise ValueError(
            f"--run-dir {run_dir}: no checkpoint can be saved there: {error}"
        ) from error
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def publish(draft: Path, checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a draft whose files are synced, and give the draft its name."""
    atomic_write_text(draft / MANIFEST, manifest_text(manifest))
    for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
        fsync_dir(folder)
    if checkpoint.exists():  # damaged
        remove(checkpoint)
    draft.rename(checkpoint)
    fsync_dir(checkpoint.parent)


def prune(folder: Path, keep: int) -> None:
    """Remove checkpoints beyond the `keep` newest; 0 keeps all.

    The newest without NaN or inf stays. Damaged ones stay and do not count. Warn of failed
    removals.
    """
    paths = complete_by_size(folder) if keep else []
    finite = next((path for path in paths if read_manifest(path)["finite"]), None)
    for path in paths[keep:]:
        if path != finite:
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
