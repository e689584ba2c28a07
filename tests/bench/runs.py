"""Runs of the recipes that an experiment trains: resumable, each with its output in a log."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_SECONDS_LEFT = 60  # of a time limit, to start a run
LOG_TAIL = 2_000  # characters of a failed command's output


@dataclass(frozen=True)
class Training:
    """A run of a recipe until step `steps`; the same one again is resumed, or finished."""

    recipe: Path
    profile: str
    folder: Path
    steps: int
    settings: Sequence[str]
    one_thread: bool = False  # with other runs beside it, more would wait for a shared CPU

    def finished(self) -> bool:
        """Return whether the last step's checkpoint is saved."""
        latest = self.folder / "checkpoints/latest"
        return latest.exists() and int(latest.read_text().removeprefix("step")) >= self.steps

    def train(self, end: float = math.inf) -> None:
        """Start or resume the run, until time.monotonic() is `end`; raise if it is not finished."""
        if self.finished():
            return
        left = end - time.monotonic()
        if left < MIN_SECONDS_LEFT:
            raise RuntimeError("was not started: --limit reached; the same command continues")
        words = ["--profile", self.profile, "--run-dir", str(self.folder), f"--until={self.steps}"]
        words += ["--resume"] if any(self.folder.glob("checkpoints/*")) else []
        words += ["--time-limit", str(int(left))] if left < math.inf else []  # saves a checkpoint
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        settings = (f"--set={setting}" for setting in self.settings)
        log = self.folder.with_name(f"{self.folder.name}.log")
        threads = {"OMP_NUM_THREADS": "1"} if self.one_thread else {}
        run_python(log, self.recipe, *words, *settings, **threads)
        if not self.finished():
            raise RuntimeError("was stopped and saved; the same command resumes it")


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
