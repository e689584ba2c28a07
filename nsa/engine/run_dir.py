"""A run's folder: choose it, and record in it what runs."""

from __future__ import annotations

import itertools
from pathlib import Path

from nsa.atomic_io import atomic_write_text
from nsa.checkpoint.weights import has_safetensors
from nsa.engine.run_request import RunRequest

RUNS = Path("runs")


def choose_run_dir(requested: Path | None, name: str, resume: bool) -> Path:
    """Return the folder of a run; a fresh run never writes into one that holds a run."""
    if requested is not None:
        _check_run_dir(requested, resume)
        return requested
    newest = None
    for number in itertools.count(1):
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        if not _holds_run(folder):
            break
        newest = folder
    if not resume:
        return folder
    if newest is None:
        raise ValueError(
            f"--resume: {folder} holds no run; drop --resume to start one, or name the run's "
            "folder with --run-dir"
        )
    return newest


def _check_run_dir(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        problem = "is a file; name a folder"
    elif has_safetensors(folder):
        problem = (
            "holds model weights, not a run; start a run from them with "
            f"--set train.start_from={folder} in another folder"
        )
    elif _holds_run(folder) and not resume:
        problem = "already holds a run; add --resume to continue it, or choose another folder"
    elif resume and not _holds_run(folder):
        problem = "holds no run; drop --resume to start one"
    else:
        return
    raise ValueError(f"--run-dir {folder}: {problem}")


def _holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists() or (folder / "checkpoints").exists()


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
