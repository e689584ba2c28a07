"""`python -m tests.bench recipe`: the recipe under DeepSpeed's launcher, on one GPU.

Reports tokens/s, peak memory beside the planner's figure, and exit codes; the run's folder, with
TensorBoard's files, is kept. With --kill-at, the rank gets `kill -9` after that step and the run is
resumed: steps that run twice must have equal losses. The data is DeepSpeed's Python files, as
bytes: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nsa.checkpoint.manifest import complete_by_size
from nsa.engine.config import RunConfig
from nsa.engine.planner_inputs import batch_of, model_of, zero_of
from nsa.engine.resolve import resolve_config
from nsa.monitor.artifacts import last_beat
from nsa.monitor.csv_files import read_metrics
from nsa.planner.memory import memory
from nsa.resources import resource_path
from nsa.system import free_port
from tests.bench.harness import Report, cell

RECIPE = resource_path("recipes/m7c.py")
SETTINGS = ("data.source=embedded", "data.tokenizer=byte", "checkpoint.keep=2")
POLL_SECONDS = 0.2
GRACE_SECONDS = 20  # between SIGTERM, which makes a run save and exit, and SIGKILL

Rows = list[dict[str, float | None]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", default="production", help="of recipes/m7c.py (%(default)s)")
    add("--zero", default="zero1_pcie", help="a config of ds_configs/ (%(default)s)")
    add("--steps", type=int, default=200, help="steps of the run (%(default)s)")
    add("--save-every", type=int, default=50, help="steps between checkpoints (%(default)s)")
    add("--kill-at", type=int, default=0, help="kill -9 after this step, then resume; 0: never")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting")
    add("--run-dir", type=Path, required=True, help="the run's folder, new")
    add("--limit", type=float, help="end the run after this many seconds")


def run(report: Report) -> None:
    """Train; with --kill-at, kill and resume. Print a line per launch, then the figures."""
    flags, result = report.flags, report.data
    if flags.run_dir.exists():
        raise ValueError(f"--run-dir {flags.run_dir}: exists; name a new folder")
    result |= {"zero": flags.zero, "profile": flags.profile, "steps": flags.steps, "launches": []}
    before: Rows = []
    attempts = ["", "--resume"] if flags.kill_at else [""]
    for number, resume in enumerate(attempts):
        kill_when = partial(_ready_to_kill, flags) if number < len(attempts) - 1 else None
        result["launches"].append(_launch(flags, resume, report.end, kill_when))
        rows = logged_rows(flags.run_dir)
        result |= figures(rows, before) | _memory(rows, flags)
        report.save()
        print(*(f"{name} {value}" for name, value in result["launches"][-1].items()), flush=True)
        saved = complete_by_size(flags.run_dir / "checkpoints")
        saved_step = int(saved[0].name.removeprefix("step")) if saved else 0
        before = [row for row in rows if (row["step"] or 0) > saved_step]
    print(
        f"tokens/s {cell(result['tokens_per_s'], ',.0f')}, peak {cell(result['peak_gb'])} GB, "
        f"planned {cell(result['planned_gb'])} GB, last loss {cell(result['loss'])}"
    )
    if not rows or rows[-1]["step"] != flags.steps:
        raise SystemExit(f"the run did not reach step {flags.steps}: see {log_file(flags.run_dir)}")


def _launch(
    flags: argparse.Namespace, resume: str, end: float, kill_when: Callable[[], bool] | None
) -> dict[str, Any]:
    """Run DeepSpeed's launcher, at most until `end`; `kill -9` the rank once `kill_when()`."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
    command += ["--master_port", str(free_port()), str(RECIPE)]
    command += ["--profile", flags.profile, "--run-dir", str(flags.run_dir)]
    if resume:
        command += [resume]
    else:
        config = resource_path(f"ds_configs/{flags.zero}.json")
        command += ["--steps", str(flags.steps), "--deepspeed_config", str(config)]
        settings = [*SETTINGS, f"checkpoint.every={flags.save_every}", *flags.set]
        command += [word for setting in settings for word in ("--set", setting)]
    start, outcome = time.monotonic(), "ended"
    with log_file(flags.run_dir).open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if kill_when is not None and kill_when():
                    outcome, kill_when = "killed", None
                    beat = last_beat(flags.run_dir / "heartbeat_rank0.jsonl")
                    assert beat is not None  # the rank has logged a step
                    os.kill(int(beat["pid"]), signal.SIGKILL)
                if time.monotonic() > end:
                    outcome = "out of time"
                    break
        finally:
            _end(process)
    seconds = round(time.monotonic() - start, 1)
    return {"launch": resume or "fresh", "outcome": outcome, "seconds": seconds,
            "exit_code": process.returncode}  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and its rank: one process group, which may outlive the launcher."""
    with suppress(ProcessLookupError):
        for number, grace in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 5)):
            os.killpg(process.pid, number)
            end = time.monotonic() + grace
            while time.monotonic() < end:
                process.poll()  # a launcher that is not reaped still counts as a process
                os.killpg(process.pid, 0)
                time.sleep(POLL_SECONDS)


def _ready_to_kill(flags: argparse.Namespace) -> bool:
    """Return whether step --kill-at is logged, and there is a checkpoint to resume from."""
    rows = logged_rows(flags.run_dir)
    logged = bool(rows) and (rows[-1]["step"] or 0) >= flags.kill_at
    return logged and bool(complete_by_size(flags.run_dir / "checkpoints"))


def recipe_config(profile: str, settings: Sequence[str] = ()) -> RunConfig:
    """Return a profile of the recipe with these settings."""
    if not RECIPE.exists():
        raise ValueError(f"there is no {RECIPE}: run this in a clone of the repository")
    return resolve_config(runpy.run_path(str(RECIPE))[profile](), assignments=list(settings))


def logged_rows(run_dir: Path) -> Rows:
    """Return the rows of the run's metrics.csv so far."""
    path = run_dir / "metrics.csv"
    return read_metrics(path) if path.exists() else []


def log_file(run_dir: Path) -> Path:
    """Return the file of the launcher's output, next to the run's folder."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    return run_dir.with_name(f"{run_dir.name}.log")


def figures(rows: Rows, before: Rows) -> dict[str, Any]:
    """Return median tokens/s after the first row, last loss, and how much repeated losses differ.

    `before` holds the rows of the killed launch that follow its newest checkpoint.
    """
    speeds = [row["tokens_per_s"] for row in rows[1:] if row["tokens_per_s"] is not None]
    earlier = {row["step"]: row["loss"] for row in before}
    twice = [(row["loss"], earlier[row["step"]]) for row in rows if row["step"] in earlier]
    differences = [abs(a - b) for a, b in twice if a is not None and b is not None]
    return {
        "logged_steps": len(rows),
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "loss": rows[-1]["loss"] if rows else None,
        "logged_twice": len(differences),
        "largest_loss_difference": max(differences, default=None),
    }


def _memory(rows: Rows, flags: argparse.Namespace) -> dict[str, float | None]:
    """Return peak memory, measured and planned; a plan counts tensors, not CUDA or fragments."""
    peaks = [row["memory_gb"] for row in rows if row["memory_gb"] is not None]
    planned, file = None, flags.run_dir / "config.yaml"
    if file.exists():
        config = resolve_config(RunConfig(), file)
        zero = zero_of(resource_path(f"ds_configs/{flags.zero}.json"), config, 1)
        planned = memory(model_of(config), zero, batch_of(config), 1).peak / 1e9
    return {"peak_gb": max(peaks, default=None), "planned_gb": planned}
