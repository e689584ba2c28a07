"""Run folder: choose it, and write config.yaml, ds_config.json and env.json."""

from __future__ import annotations

import itertools
from pathlib import Path

from nsa.atomic_io import atomic_write_text
from nsa.checkpoint.weights import has_safetensors
from nsa.engine.run_request import RunRequest


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
