"""`python -m nsa.bench ablations`: train and time the demo with parts of its attention changed.

The recipe trains every variant with every seed, which sets initial weights and data order; all are
evaluated on the same validation sequences. Speed is measured separately: variants alternate in one
process, in CPU time, as in `nsa bench health`. Finished runs are kept, interrupted ones resumed.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.bench.environment import environment
from nsa.bench.health import TimedModel
from nsa.bench.options import add_out, at_least, choice
from nsa.bench.results import save
from nsa.engine.config import RunConfig
from nsa.engine.resolve import resolve_config
from nsa.model import parameter_count
from nsa.monitor.metrics_csv import read_metrics
from nsa.report.markdown import spread, table
from nsa.resources import resource_path

RECIPE = resource_path("recipes/m7c.py")
VARIANTS: dict[str, tuple[str, ...]] = {  # changes of the demo's settings
    "nsa": (),
    "dense": ("attention.kind=dense",),
    "cmp": ("attention.branches=cmp",),
    "sel": ("attention.branches=sel",),
    "win": ("attention.branches=win",),
    "cmp+win": ("attention.branches=cmp+win",),
    "sel+win": ("attention.branches=sel+win",),
    "mlp": ("attention.compressor=mlp",),
    "shared-kv": ("attention.shared_kv=true",),
    "blocks-32-16-64": (
        "attention.spec.block_len=32",
        "attention.spec.block_stride=16",
        "attention.spec.select_len=64",
        "attention.spec.select_top=4",  # 6 would be all blocks of a sequence but two
    ),
    "top-3": ("attention.spec.select_top=3",),  # only those that are always selected
    "top-12": ("attention.spec.select_top=12",),
    "window-64": ("attention.spec.window=64",),
    "window-256": ("attention.spec.window=256",),
}
COMMON = (
    "train.eval_every=0",  # only at the end,
    "train.eval_samples=256",  # but on more validation data
    # One process has half of the demo's tokens per step; at its learning rate the loss spikes.
    "train.learning_rate=1e-3",
    "train.min_learning_rate=1e-4",
    "checkpoint.keep=1",
    "monitor.report=false",
)
METRICS = "val_loss", "bits_per_byte"
LOG_TAIL = 2_000  # characters of a failed run's log to print
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Training:
    """One run of the recipe: a variant with a seed."""

    variant: str
    seed: int
    steps: int
    folder: Path

    @property
    def settings(self) -> list[str]:
        """Changes of the demo's settings."""
        run = f"train.seed={self.seed}", f"train.steps={self.steps}"
        return [*COMMON, *run, *VARIANTS[self.variant]]

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    def result(self) -> dict[str, float] | None:
        """The validation metrics of the last step; None if the run is not finished."""
        path = self.folder / "metrics.csv"
        rows = read_metrics(path) if path.exists() else []
        if not rows or rows[-1]["step"] != self.steps:
            return None
        metrics = {name: rows[-1][name] for name in METRICS}
        return {name: value for name, value in metrics.items() if value is not None} or None

    def check(self) -> None:
        """Raise if the folder has a run with other settings."""
        file, config = self.folder / "config.yaml", _config(self.settings)
        if file.exists() and resolve_config(config, file) != config:
            raise ValueError(
                f"--runs {self.folder.parent}: {file} has different settings from this command; "
                "choose another folder, or the --steps of that run"
            )

    def start(self, threads: int) -> subprocess.Popen[bytes]:
        """Start the recipe in its own session, with a log file beside its folder."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if (self.folder / "config.yaml").exists() else []
        command = [sys.executable, str(RECIPE), "--profile", "demo", *resume]
        command += ["--run-dir", str(self.folder)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, *(f"--set={setting}" for setting in self.settings)],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt reaches it through train_all, once
            )


def add_flags(parser: argparse.ArgumentParser) -> None:
    every = ",".join(VARIANTS)
    parser.add_argument("--runs", type=Path, default="runs/ablations", help="folder of the runs")
    parser.add_argument("--steps", type=at_least(1), default=300, help="per run (%(default)s)")
    parser.add_argument("--seeds", type=_seeds, default="1,2,3", help="(%(default)s)")
    parser.add_argument(
        "--variants", type=choice(*VARIANTS), default=every, help="which to train (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=at_least(1), default=2, help="concurrent runs, sharing the CPU cores"
    )
    parser.add_argument("--rounds", type=at_least(2), default=20, help="timed steps per variant")
    add_out(parser)


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(at_least(0)(word) for word in text.split(",")))


def run(flags: argparse.Namespace) -> None:
    """Train unfinished runs, measure speed, print the table and save the figures.

    Exit codes: 0; 1 if a run failed; 2 for a mistake, with a line on stderr.
    """
    try:
        result = measure(flags)
    except ValueError as error:
        print(f"ablations: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # SIGTERM too
        print("interrupted; run the same command to continue", file=sys.stderr)
        raise SystemExit(130) from None
    print("\n".join(lines(result)))
    save(flags.out, result)
    if result["failures"]:
        raise SystemExit(1)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Train and time all variants."""
    configs = {name: _config(VARIANTS[name]) for name in flags.variants}
    trainings = [
        Training(name, seed, flags.steps, flags.runs / f"{name}-seed{seed}")
        for seed in flags.seeds
        for name in flags.variants
    ]
    for training in trainings:
        training.check()
    failures = train_all([one for one in trainings if one.result() is None], flags.jobs)
    speeds = tokens_per_s(configs, flags.rounds)
    rows = []
    for name, config in configs.items():
        results = {str(x.seed): x.result() for x in trainings if x.variant == name}
        finished = {seed: result for seed, result in results.items() if result}
        rows.append(
            {
                "variant": name,
                "settings": list(VARIANTS[name]),
                "parameters": parameter_count(config.model),
                **{metric: {seed: x[metric] for seed, x in finished.items()} for metric in METRICS},
                "tokens_per_s": speeds[name],
            }
        )
    return {
        "environment": environment(flags.arguments),
        "steps": flags.steps,
        "seeds": flags.seeds,
        "rounds": flags.rounds,
        "rows": rows,
        "failures": failures,
    }


def train_all(trainings: Sequence[Training], jobs: int) -> list[str]:
    """Run `jobs` trainings at a time and return the failures; an interrupt ends them all."""
    waiting, running = list(trainings), dict[subprocess.Popen[bytes], Training]()
    failures: list[str] = []
    start, handler = time.monotonic(), signal.signal(signal.SIGTERM, signal.default_int_handler)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                training = waiting.pop(0)
                running[training.start(threads)] = training
            time.sleep(POLL_SECONDS)
            for process in [one for one in running if one.poll() is not None]:
                training = running.pop(process)
                result = training.result()
                if result is None:
                    failures.append(f"{training} ended with exit code {process.returncode}")
                    log = training.log.read_text(errors="replace")
                    print(f"{log[-LOG_TAIL:]}\n{failures[-1]}", flush=True)
                    continue
                done = len(trainings) - len(waiting) - len(running)
                print(
                    f"{training}: validation loss {result['val_loss']:.4f}, {done} of "
                    f"{len(trainings)} runs after {(time.monotonic() - start) / 60:.1f} minutes",
                    flush=True,
                )
    finally:
        for process in running:
            process.terminate()  # it saves a checkpoint and can be resumed
        for process in running:
            process.wait()
        signal.signal(signal.SIGTERM, handler)
    return failures


def tokens_per_s(configs: Mapping[str, RunConfig], rounds: int) -> dict[str, list[float]]:
    """Quartiles of each model's training speed, in the time of one CPU core without a GPU."""
    sizes = {name: (one.train.micro_batch, one.data.seq_len) for name, one in configs.items()}
    models = {
        name: TimedModel(config.model, *sizes[name], dtype=torch.bfloat16)
        for name, config in configs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time also counts threads that wait for others
    for index in range(rounds + 1):
        for name, model in models.items():
            elapsed = model.step(record=False)
            if index:  # the first step allocates memory
                seconds[name].append(elapsed)
    torch.set_num_threads(threads)
    return {
        name: statistics.quantiles([batch * seq_len / x for x in seconds[name]], n=4)
        for name, (batch, seq_len) in sizes.items()
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The rows as a Markdown table."""
    losses = {row["variant"]: row["val_loss"] for row in result["rows"]}
    base = losses.get("nsa", {})
    heads = ["variant", "validation loss", "minus nsa's", "bits per byte", "tokens/s", "parameters"]
    cells = []
    for row in result["rows"]:
        loss, (low, middle, high) = row["val_loss"], row["tokens_per_s"]
        difference = [loss[seed] - base[seed] for seed in loss if seed in base]
        cells.append(
            [
                row["variant"],
                spread(list(loss.values()), ".3f"),
                "" if loss is base else spread(difference, "+.3f"),
                spread(list(row["bits_per_byte"].values()), ".3f"),
                f"{middle:,.0f} ({low:,.0f} to {high:,.0f})",
                f"{row['parameters']:,}",
            ]
        )
    return table(heads, cells)


def _config(settings: Sequence[str]) -> RunConfig:
    """The recipe's demo with these settings."""
    if not RECIPE.exists():
        raise ValueError(f"there is no {RECIPE}: run this in a clone of the repository")
    return resolve_config(runpy.run_path(str(RECIPE))["demo"](), assignments=list(settings))
