"""Run folder: choose it, lock it, and write config.yaml, ds_config.json and env.json."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from nsa.atomic_io import atomic_write_text, no_symlink
from nsa.checkpoint.commit import newest_valid
from nsa.checkpoint.weights import has_safetensors
from nsa.engine.run_request import RunRequest
from nsa.text import printable

LOCK = ".lock"
CONFIG_FILES = ("config.yaml", "ds_config.json")  # of a run's folder, and of each checkpoint


def choose_run_dir(requested: Path | None, name: str, resume: bool) -> Path:
    """Return the run's folder; refuse one that holds a run unless it is resumed."""
    if requested is not None:
        try:
            str(requested).encode()
        except UnicodeEncodeError:
            shown = printable(str(requested))
            raise ValueError(
                f"--run-dir {shown}: is not UTF-8, so no file can record it; choose another folder"
            ) from None
        with _refused_if_unusable(requested):
            problem = _problem_of(requested, resume)
        if problem is not None:
            raise ValueError(f"--run-dir {requested}: {problem}")
        return requested
    if not resume:
        folder, number = Path("runs") / name, 1
        while _holds_run(folder):
            number += 1
            folder = Path("runs") / f"{name}-{number}"
        return folder
    numbered = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    runs = {  # by number
        int(match[1] or 1): folder
        for folder in Path("runs").glob(f"{name}*")
        if (match := numbered.fullmatch(folder.name)) and _holds_run(folder)
    }
    if not runs:
        raise ValueError(
            f"--resume: runs/{name} holds no run; drop --resume to start one, or name the run's "
            "folder with --run-dir"
        )
    return runs[max(runs)]


def _problem_of(folder: Path, resume: bool) -> str | None:
    if folder.exists() and not folder.is_dir():
        return "is a file; name a folder"
    if has_safetensors(folder):
        return (
            "holds model weights, not a run; start a run from them with "
            f"--set train.start_from={folder} in another folder"
        )
    if resume and not _holds_run(folder):
        return "holds no run; drop --resume to start one"
    if not resume and _holds_run(folder):
        return "already holds a run; add --resume to continue it, or choose another folder"
    return None


def _holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists() or (folder / "checkpoints").exists()


@contextlib.contextmanager
def _refused_if_unusable(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--run-dir {run_dir}: no files can be written there ({error.strerror}); choose "
            "another folder"
        ) from None


def find_saved(run_dir: Path) -> tuple[Path | None, Path | None, list[str]]:
    """Return the newest valid checkpoint, the folder of the run's settings, and log lines.

    Settings are in the checkpoint. Without a checkpoint, or if an earlier version wrote it, they
    are in the run's folder. None stands for what does not exist.
    """
    path, damaged = newest_valid(run_dir / "checkpoints")
    notes = [f"skipped: {note}" for note in damaged]
    if path is None:
        why = f"none of {len(notes)} checkpoints is valid" if notes else "no checkpoint was saved"
        notes.append(f"--resume: {why}; starting at step 0")
    elif notes:
        notes.append(f"resuming from {path.name}")
    if path is not None and all((path / name).exists() for name in CONFIG_FILES):
        return path, path, notes
    settings = run_dir if (run_dir / "config.yaml").exists() else None
    return path, settings, notes


def record_run(request: RunRequest, hosts: list[str], kernel_check: list[dict[str, Any]]) -> None:
    """Write config.yaml, ds_config.json and env.json.

    `hosts` has the host of each rank; `kernel_check` has a row per operation, checked on rank 0.
    """
    from nsa.monitor.environment import write_env

    for name, text in request.config_files().items():
        atomic_write_text(request.run_dir / name, text)
    write_env(
        request.run_dir,
        recipe=request.recipe,
        profile=request.profile,
        notes=request.notes,
        world_size=len(hosts),
        hosts=hosts,
        kernel_check=kernel_check,
    )


class FolderLock:
    """A file lock that the process holds until it ends."""

    def __init__(self, run_dir: Path) -> None:
        """Create and lock the folder; raise ValueError if that fails or another run holds it."""
        self._run_dir = run_dir
        self._created: list[Path] = []  # file and folders, innermost first
        self._file: TextIO | None = None
        with _refused_if_unusable(run_dir):
            try:
                self._open()
            except OSError:
                self.undo()
                raise

    def _open(self) -> None:
        if self._run_dir.is_symlink():
            self._run_dir.stat()  # raises a clearer error than mkdir for a broken link or a loop
        path = self._run_dir / LOCK
        used = (path, self._run_dir, *self._run_dir.parents)
        self._created = [entry for entry in used if not entry.exists()]
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+", opener=no_symlink)  # noqa: SIM115 (held until the end)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                self.undo()
                raise ValueError(
                    f"--run-dir {self._run_dir}: its file system cannot lock files "
                    f"({error.strerror}), so two runs could write there; choose another folder"
                ) from None
            self._file.seek(0)
            owner = printable(self._file.read(200))
            raise ValueError(  # without undo(): the other run needs the folder and the lock file
                f"{self._run_dir}: in use by another run ({owner}); wait until it ends, or choose "
                "another --run-dir"
            ) from None
        self._file.truncate(0)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}, since {now}")
        self._file.flush()

    def undo(self) -> None:
        """Remove the folders and the file that this lock created, and release the lock."""
        with contextlib.suppress(OSError):  # another run may use a parent folder
            for path in self._created:
                if path == self._run_dir:
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name == LOCK:
                    path.unlink(missing_ok=True)
                else:
                    path.rmdir()
        if self._file is not None:
            self._file.close()
