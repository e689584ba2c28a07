"""`python -m nsa.bench ablations`: train and time the demo with parts of its attention changed.

The recipe trains every variant with every seed, which sets initial weights and data order; all are
evaluated on the same validation sequences. Speed is measured separately: variants alternate in one
process, in CPU time, as in `nsa bench health`. Finished runs are kept, interrupted ones resumed.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa.bench.health import TimedModel
from nsa.bench.options import choice
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
ROUNDS = 20  # timed steps per variant


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

    def result(self) -> dict[str, Any] | None:
        """The validation metrics of the last step; None if the run is not finished."""
        path = self.folder / "metrics.csv"
        rows = read_metrics(path) if path.exists() else []
        if not rows or rows[-1]["step"] != self.steps or rows[-1]["val_loss"] is None:
            return None
        return {name: rows[-1][name] for name in METRICS}

    def check(self) -> None:
        """Raise if the folder has a run with other settings."""
        file, config = self.folder / "config.yaml", _config(self.settings)
        if file.exists() and resolve_config(config, file) != config:
            raise ValueError(
                f"--runs {self.folder.parent}: {file} has different settings from this command; "
                "choose another folder, or the --steps of that run"
            )

    def train(self, threads: int) -> str | None:
        """Start or resume the run; return its failure, if any."""
        if self.result():
            return None
        resume = ["--resume"] if (self.folder / "config.yaml").exists() else []
        command = [sys.executable, str(RECIPE), "--profile", "demo", *resume]
        command += ["--run-dir", str(self.folder), *(f"--set={x}" for x in self.settings)]
        log = self.folder.with_name(f"{self.folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        name = f"{self.variant}, seed {self.seed}"
        if result := self.result():
            print(f"{name}: validation loss {result['val_loss']:.4f}", flush=True)
            return None
        failure = f"{name} ended with exit code {done.returncode}"
        print(f"{log.read_text(errors='replace')[-LOG_TAIL:]}\n{failure}", flush=True)
        return failure


def add_flags(parser: argparse.ArgumentParser) -> None:
    add, every = parser.add_argument, ",".join(VARIANTS)
    add("--runs", type=Path, default="runs/ablations", help="folder of the runs")
    add("--steps", type=int, default=300, help="per run (%(default)s)")
    add("--seeds", type=_seeds, default="1,2,3", help="(%(default)s)")
    add("--variants", type=choice(*VARIANTS), default=every, help="to train (%(default)s)")
    add("--jobs", type=int, default=2, help="concurrent runs, sharing the CPU cores")


def _seeds(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Train unfinished runs, measure speed and print the table."""
    configs = {name: _config(VARIANTS[name]) for name in flags.variants}
    trainings = [
        Training(name, seed, flags.steps, flags.runs / f"{name}-seed{seed}")
        for seed in flags.seeds
        for name in flags.variants
    ]
    for training in trainings:
        training.check()
    threads = max(1, (os.cpu_count() or 1) // flags.jobs)
    # Ctrl-C reaches the runs too: they save a checkpoint and can be resumed.
    with ThreadPoolExecutor(flags.jobs) as pool:
        failures = [*pool.map(partial(Training.train, threads=threads), trainings)]
    speeds = tokens_per_s(configs)
    rows = [
        {
            "variant": name,
            "settings": list(VARIANTS[name]),
            "parameters": parameter_count(config.model),
            **{
                metric: {
                    str(x.seed): result[metric]
                    for x in trainings
                    if x.variant == name and (result := x.result())
                }
                for metric in METRICS
            },
            "tokens_per_s": speeds[name],
        }
        for name, config in configs.items()
    ]
    result = {
        "steps": flags.steps,
        "seeds": flags.seeds,
        "rounds": ROUNDS,
        "rows": rows,
        "failures": [failure for failure in failures if failure],
    }
    print("\n".join(lines(result)))
    return result


def tokens_per_s(configs: Mapping[str, RunConfig]) -> dict[str, list[float]]:
    """Quartiles of each model's training speed, in the time of one CPU core without a GPU."""
    models = {
        name: TimedModel(c.model, c.train.micro_batch, c.data.seq_len, torch.bfloat16)
        for name, c in configs.items()
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time also counts threads that wait for others
    rounds = [
        [model.tokens / model.step(record=False) for model in models.values()]
        for _ in range(ROUNDS + 1)
    ]
    torch.set_num_threads(threads)
    speeds = zip(*rounds[1:], strict=True)  # the first step allocates memory
    return {name: statistics.quantiles(x, n=4) for name, x in zip(models, speeds, strict=True)}


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
