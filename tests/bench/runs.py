"""Runs that an experiment trains, each resumable with its output in a log, and kept results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nsa.atomic_io import atomic_write_text
from nsa.model import LanguageModel
from nsa.model.loss import token_losses

LOG_TAIL = 2_000  # characters of a failed command's output


def train_run(
    recipe: Path, profile: str, folder: Path, steps: int, settings: Sequence[str], **variables: str
) -> None:
    """Train a recipe until step `steps`, if that is not done; resume a run that was stopped."""

    def finished() -> bool:
        latest = folder / "checkpoints/latest"
        return latest.exists() and int(latest.read_text().removeprefix("step")) >= steps

    if finished():
        return
    words = ["--profile", profile, "--run-dir", str(folder), f"--until={steps}"]
    words += ["--resume"] if any(folder.glob("checkpoints/*")) else []
    words += [f"--set={setting}" for setting in settings]
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_python(folder.with_name(f"{folder.name}.log"), recipe, *words, **variables)
    if not finished():
        raise RuntimeError(f"{folder} was stopped and saved; the same command resumes it")


def run_python(log: Path, *words: str | Path, **variables: str) -> None:
    """Run a Python program; print the end of its output and raise if it fails."""
    print("$", sys.executable, *words, flush=True)
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        print(log.read_text(errors="replace")[-LOG_TAIL:], file=sys.stderr)
        raise RuntimeError(f"ended with exit code {done.returncode}: its output is in {log}")


def kept(file: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results in a file, which are measured if there is none."""
    if not file.exists():
        atomic_write_text(file, json.dumps(measure()))
    return dict(json.loads(file.read_text()))


def document_losses(model: LanguageModel, row: Tensor) -> Tensor:
    """Return the loss of each of the tokens [T + 1] but the first."""
    return token_losses(model.hidden(row[None, :-1])[0], model.head_weight, row[1:])
