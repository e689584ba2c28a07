"""Run folder: choose it, lock it, and write config.yaml, ds_config.json and env.json."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path

import yaml

from nsa.atomic_io import atomic_write_text
from nsa.checkpoint.manifest import holds_intact, list_checkpoints
from nsa.checkpoint.weights import has_safetensors
from nsa.engine.config import RunConfig
from nsa.engine.run_request import RunRequest

LOCK = ".lock"
SETTINGS = ("config.yaml", "ds_config.json")  # of a run's folder, and of each checkpoint


def choose_run_dir(requested: Path | None, name: str, resume: bool) -> Path:
    """Return the run's folder; refuse one that holds a run unless it is resumed."""
    if requested is not None:
        problem = _problem_with(requested, resume)
        if problem is not None:
            raise ValueError(f"--run-dir {requested}: {problem}")
        return requested
    folders = (Path("runs") / (f"{name}-{n}" if n > 1 else name) for n in itertools.count(1))
    used = list(itertools.takewhile(_holds_run, folders))
    if not resume:
        return Path("runs") / (f"{name}-{len(used) + 1}" if used else name)
    if not used:
        raise ValueError(
            f"--resume: runs/{name} holds no run; drop --resume to start one, or name the run's "
            "folder with --run-dir"
        )
    return used[-1]


def _problem_with(folder: Path, resume: bool) -> str | None:
    if folder.exists() and not folder.is_dir():
        return "is a file; name a folder"
    if has_safetensors(folder):
        return (
            "holds model weights, not a run; start a run from them with "
            f"--set train.start_from={folder} in another folder"
        )
    if _holds_run(folder) and not resume:
        return "already holds a run; add --resume to continue it, or choose another folder"
    if resume and not _holds_run(folder):
        return "holds no run; drop --resume to start one"
    return None


def _holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists() or (folder / "checkpoints").exists()


def find_saved_settings(run_dir: Path) -> Path | None:
    """Return the folder with the config.yaml and ds_config.json that a resumed run continues with.

    That is the newest checkpoint with both intact. Before the first one, and for checkpoints of
    earlier versions, it is the run's folder, or None without a config.yaml.
    """
    for path in list_checkpoints(run_dir / "checkpoints"):
        if holds_intact(path, SETTINGS):
            return path
    file = run_dir / SETTINGS[0]
    if not file.exists():
        return None
    try:
        sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        sections = None
    for field in fields(RunConfig):
        if not isinstance(sections, dict) or not isinstance(sections.get(field.name), dict):
            raise ValueError(
                f"--resume: {file} is incomplete: it lacks the section {field.name}; restore it, "
                "or start a fresh run in another folder"
            )
    return run_dir


def record_run(request: RunRequest, hosts: list[str]) -> None:
    """Write config.yaml, ds_config.json and env.json; `hosts` are in the order of the ranks."""
    from nsa.monitor.run_folder import write_env

    for name, text in request.config_files().items():
        atomic_write_text(request.run_dir / name, text)
    write_env(
        request.run_dir,
        recipe=request.recipe,
        profile=request.profile,
        notes=request.notes,
        world_size=len(hosts),
        hosts=hosts,
    )


class FolderLock:
    """A file lock that the process holds until it ends."""

    def __init__(self, run_dir: Path) -> None:
        """Create and lock the folder; raise ValueError if another run holds it."""
        self._run_dir = run_dir
        self._created = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / LOCK).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            raise ValueError(
                f"{run_dir}: in use by another run{_describe_owner(self._file.read())}; wait until "
                "it ends, or choose another --run-dir"
            ) from None
        self._file.truncate(0)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = {"pid": os.getpid(), "host": os.uname().nodename, "since": now}
        self._file.write(json.dumps(owner) + "\n")
        self._file.flush()

    def abandon(self) -> None:
        """Release the folder and remove the folders that this lock created."""
        if self._created:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run uses a parent
            for parent in self._created[1:]:
                parent.rmdir()
        self._file.close()


def _describe_owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f" (process {owner['pid']} on {owner['host']}, since {owner['since']})"
    except (ValueError, KeyError, TypeError):
        return ""
