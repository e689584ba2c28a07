"""How the files of many ranks become one checkpoint: all of it, or nothing.

    .step00000010.partial/          the draft: a crash leaves it, and the next run removes it
        *.pt state.json …           each rank's files, brought to disk and hashed by that rank
        .part0 .part1               each rank's share of the manifest, or why it failed
        manifest.json               by rank 0, once all parts are there
    step00000010/                   the same folder, renamed: from here on it is a checkpoint
    latest                          written last

Ranks wait for each other through files, so that no collective runs beside training's.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text, fsync_dir
from nsa.checkpoint.errors import explain
from nsa.checkpoint.manifest import (
    MANIFEST,
    checkpoint_name,
    find_problem,
    list_checkpoints,
    manifest_text,
    read_manifest,
    seal,
)

LATEST = "latest"
POLL = 0.02  # seconds between two looks at whether the other ranks are done
PARTIAL = ".partial"


class Aborted(ValueError):
    """The other ranks were known to have failed before their parts said so."""


def draft_of(folder: Path, step: int) -> Path:
    """Where a checkpoint is put together."""
    return folder / f".{checkpoint_name(step)}{PARTIAL}"


def new_draft(folder: Path, step: int) -> Path:
    """An empty draft; what a crash left of an earlier one goes."""
    draft = draft_of(folder, step)
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
    except OSError as error:
        raise ValueError(explain(error, Path(error.filename or draft))) from error
    return draft


def remove_drafts(folder: Path) -> None:
    """What crashes left: drafts, and checkpoints whose removal was cut short."""
    for path in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*"):
        with contextlib.suppress(OSError):
            path.unlink()


def write_part(draft: Path, rank: int, names: Iterable[str], about: dict[str, Any]) -> None:
    """Bring one rank's files to disk and say what they hold; raises a ValueError with the fix."""
    path = draft
    try:
        files = {}
        for name in names:
            path = draft / name
            files[name] = seal(path)
        path = _part(draft, rank)
        atomic_write_text(path, json.dumps({"files": files, **about}))
    except OSError as error:
        raise ValueError(explain(error, path)) from error


def write_failure(draft: Path, rank: int, names: Iterable[str], why: str) -> None:
    """Give back the room of one rank's files, and tell rank 0 not to wait."""
    for name in names:
        with contextlib.suppress(OSError):
            (draft / name).unlink(missing_ok=True)
    with contextlib.suppress(
        OSError
    ):  # where no file can be written, the ranks' next meeting tells
        atomic_write_text(_part(draft, rank), json.dumps({"error": why}))


def wait_for_parts(draft: Path, ranks: int, abort: threading.Event) -> list[dict[str, Any]]:
    """Every rank's part; raises a ValueError with the reasons where some rank failed."""
    parts: dict[int, dict[str, Any]] = {}
    while len(parts) < ranks:
        if abort.is_set():
            raise Aborted("another rank failed")
        for rank in set(range(ranks)) - set(parts):
            with contextlib.suppress(FileNotFoundError):
                parts[rank] = json.loads(_part(draft, rank).read_text(encoding="utf-8"))
        if len(parts) < ranks:
            time.sleep(POLL)
    errors = [parts[rank]["error"] for rank in range(ranks) if "error" in parts[rank]]
    if errors:
        raise ValueError("; ".join(dict.fromkeys(errors)))
    return [parts[rank] for rank in range(ranks)]


def commit(folder: Path, step: int, parts: list[dict[str, Any]], about: dict[str, Any]) -> Path:
    """Turn a finished draft into the checkpoint of `step`; raises a ValueError with the fix."""
    draft, path = draft_of(folder, step), folder / checkpoint_name(step)
    at = draft / MANIFEST
    content = {
        **about,
        "step": step,
        "ranks": len(parts),
        "time": time.time(),
        "finite": all(part["finite"] for part in parts),
        "files": {name: entry for part in parts for name, entry in sorted(part["files"].items())},
    }
    try:
        for rank in range(len(parts)):
            _part(draft, rank).unlink()
        atomic_write_text(at, manifest_text(content))
        fsync_dir(draft)
        at = path
        if path.exists():  # one that was passed over as broken, or left behind by a rollback
            remove(path)
        draft.rename(path)
        fsync_dir(folder)
        at = folder / LATEST
        atomic_write_text(at, path.name)
        fsync_dir(folder)
    except OSError as error:
        raise ValueError(explain(error, at)) from error
    return path


def prune(folder: Path, keep: int, keep_hours: float, now: float) -> list[str]:
    """Remove checkpoints beyond the `keep` newest or older than `keep_hours`; 0 sets no limit.

    The newest stays, and the newest without NaN or inf. Broken ones count for nothing and are left
    to whoever wants to look at them. Returns what could not be removed, and why.
    """
    whole = [path for path in list_checkpoints(folder) if not find_problem(path, hashes=False)]
    about = {path: read_manifest(path) for path in whole}
    spared = {*whole[:1], *[path for path in whole if about[path]["finite"]][:1]}
    failed = []
    for place, path in enumerate(whole):
        too_many = keep and place >= keep
        too_old = keep_hours and now - about[path]["time"] > keep_hours * 3600
        if path not in spared and (too_many or too_old):
            try:
                remove(path)
            except OSError as error:
                failed.append(f"{path} could not be removed: {error.strerror}")
    return failed


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint so that one half removed is never taken for one, with what it became."""
    for path in (checkpoint.with_name(f"{checkpoint.name}.universal"), checkpoint):
        if path.exists():
            gone = path.with_name(f".{path.name}.removed{PARTIAL}")
            if gone.exists():
                shutil.rmtree(gone)
            path.rename(gone)
            shutil.rmtree(gone)


def _part(draft: Path, rank: int) -> Path:
    return draft / f".part{rank}"
