"""`python -m nsa.bench ablations`: what each part of the demo's attention is good for.

Every variant is trained by the recipe with every seed, which decides the initial weights and the
order of the text; all are judged by the same held-out text. Speed is measured apart from that:
variants take turns in one process, and the clock is the processors', as in `nsa bench health`.

A run that is finished is not repeated, and one that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
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
from typing import TYPE_CHECKING, Any

from nsa.atomic_io import atomic_write_text
from nsa.report.markdown import spread, table
from nsa.resources import resource_path

if TYPE_CHECKING:
    from nsa.engine.config import RunConfig

RECIPE = resource_path("recipes/m7c.py")
VARIANTS: dict[str, tuple[str, ...]] = {  # what is changed of the demo
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
        "attention.spec.select_top=4",  # 6 would be all blocks but two of a sequence
    ),
    "top-3": ("attention.spec.select_top=3",),  # only those that are always in
    "top-12": ("attention.spec.select_top=12",),
    "window-64": ("attention.spec.window=64",),
    "window-256": ("attention.spec.window=256",),
}
COMMON = (
    "train.eval_every=0",  # at the end only,
    "train.eval_samples=256",  # but over more of the held-out text
    # One process has half the tokens of the demo's step, and at its learning rate the loss leaps.
    "train.learning_rate=1e-3",
    "train.min_learning_rate=1e-4",
    "checkpoint.keep=1",
    "monitor.report=false",
)
FINISHED = "val_loss", "bits_per_byte"
TAIL = 2_000  # characters of a failed run's last words
PAUSE = 0.1  # seconds between two looks at the runs


@dataclass(frozen=True)
class Training:
    """One run of the recipe: a variant with a seed."""

    variant: str
    seed: int
    steps: int
    folder: Path

    @property
    def settings(self) -> list[str]:
        """What it has instead of the demo's values."""
        own = [f"train.seed={self.seed}", f"train.steps={self.steps}"]
        return [*COMMON, *own, *VARIANTS[self.variant]]

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    def result(self) -> dict[str, float] | None:
        """The held-out loss at the end; None where the run has not got there."""
        from nsa.monitor.metrics_csv import read_metrics

        path = self.folder / "metrics.csv"
        rows = read_metrics(path) if path.exists() else []
        if not rows or rows[-1]["step"] != self.steps:
            return None
        found = {name: rows[-1][name] for name in FINISHED}
        return {name: value for name, value in found.items() if value is not None} or None

    def check(self, asked: RunConfig) -> None:
        """Raise where the folder holds a run with other settings than `asked`."""
        from nsa.engine.resolve import resolve_config

        file = self.folder / "config.yaml"
        if file.exists() and resolve_config(asked, file) != asked:
            raise ValueError(
                f"--runs {self.folder.parent}: {file} has other settings than this command's; "
                "choose another folder, or the --steps that it was begun with"
            )

    def start(self, threads: int) -> subprocess.Popen[bytes]:
        """The recipe in a process of its own; what it says is kept in a log beside its folder."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        began = (self.folder / "config.yaml").exists()
        words = [sys.executable, str(RECIPE), "--profile", "demo", "--run-dir", str(self.folder)]
        words += ["--resume"] if began else []
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*words, *(f"--set={setting}" for setting in self.settings)],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what ends them comes from here, once
            )

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-TAIL:]

    @property
    def _log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


def run(flags: argparse.Namespace) -> None:
    """Train what is not trained yet, measure speed, print the table and keep it.

    Exit codes: 0, 1 where a run failed, 2 with a line for a mistake.
    """
    try:
        result = measure(flags)
    except ValueError as error:
        print(f"ablations: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # by SIGTERM too
        print("ended; the same command goes on with what is left", file=sys.stderr)
        raise SystemExit(130) from None
    print("\n".join(lines(result)))
    if flags.out is not None:
        atomic_write_text(flags.out, json.dumps(result, indent=1) + "\n")
        atomic_write_text(flags.out.with_suffix(".md"), page(result))
    if result["failures"]:
        raise SystemExit(1)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All figures, with where they come from."""
    from nsa.bench.measure import environment

    configs = {name: _config(VARIANTS[name]) for name in flags.variants}
    trainings = [
        Training(name, seed, flags.steps, flags.runs / f"{name}-seed{seed}")
        for seed in flags.seeds
        for name in flags.variants
    ]
    for training in trainings:
        training.check(_config(training.settings))
    failures = train_all([one for one in trainings if one.result() is None], flags.jobs)
    speeds = tokens_per_s(configs, flags.rounds)
    return {
        "environment": environment(),
        "steps": flags.steps,
        "seeds": flags.seeds,
        "rounds": flags.rounds,
        "rows": [_row(name, configs[name], speeds[name], trainings) for name in flags.variants],
        "failures": failures,
    }


def train_all(trainings: Sequence[Training], jobs: int) -> list[str]:
    """Take them `jobs` at a time; returns what failed. Whoever ends this ends them too."""
    waiting, running = list(trainings), dict[subprocess.Popen[bytes], Training]()
    failures: list[str] = []
    begin, before = time.monotonic(), signal.signal(signal.SIGTERM, signal.default_int_handler)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                training = waiting.pop(0)
                running[training.start(threads)] = training
            time.sleep(PAUSE)
            for process in [one for one in running if one.poll() is not None]:
                training = running.pop(process)
                found = training.result()
                if found is None:
                    failures.append(f"{training.name} ended with exit code {process.returncode}")
                    print(f"{training.last_words()}\n{failures[-1]}", flush=True)
                    continue
                done = len(trainings) - len(waiting) - len(running)
                print(
                    f"{training.name}: held-out loss {found['val_loss']:.4f}, {done} of "
                    f"{len(trainings)} runs after {(time.monotonic() - begin) / 60:.1f} minutes",
                    flush=True,
                )
    finally:
        for process in running:
            process.terminate()  # it saves, and can be gone on with
        for process in running:
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return failures


def tokens_per_s(configs: Mapping[str, RunConfig], rounds: int) -> dict[str, list[float]]:
    """Quartiles of each model's training speed, by one processor's time where there is no GPU."""
    import torch

    from nsa.bench.health import Stepper

    steppers = {
        name: Stepper(
            config.model, config.train.micro_batch, config.data.seq_len, dtype=torch.bfloat16
        )
        for name, config in configs.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in configs}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a thread that waits for another takes processor time too
    for turn in range(rounds + 1):
        for name, stepper in steppers.items():
            seconds = stepper.step(heard=False)
            if turn:  # the first pays for memory
                taken[name].append(seconds)
    torch.set_num_threads(threads)
    tokens = {name: one.train.micro_batch * one.data.seq_len for name, one in configs.items()}
    return {
        name: statistics.quantiles([tokens[name] / second for second in seconds], n=4)
        for name, seconds in taken.items()
    }


def page(result: Mapping[str, Any]) -> str:
    """The table with what it was measured on."""
    here = result["environment"]
    return "\n".join(
        [
            "# Ablations, measured\n",
            f"Written by `{here['command']}` on {here['date'][:10]}: {here['processor']}, torch "
            f"{here['torch']}. What the columns mean, and what follows from them, is in "
            "`docs/ablations.md`.\n",
            f"{result['steps']:,} steps of the demo with seeds "
            f"{', '.join(map(str, result['seeds']))}: means, and in brackets the least and the "
            f"most. Speed: medians and quartiles of {result['rounds']} steps.\n",
            *lines(result),
            *(f"\n**{failure}**" for failure in result["failures"]),
            "",
        ]
    )


def lines(result: Mapping[str, Any]) -> list[str]:
    """The rows as a Markdown table."""
    by_name = {row["variant"]: row["val_loss"] for row in result["rows"]}
    base = by_name.get("nsa", {})
    heads = ["variant", "held-out loss", "beyond nsa's", "bits a byte", "tokens/s", "parameters"]
    cells = []
    for row in result["rows"]:
        losses = row["val_loss"]
        beyond = [losses[seed] - base[seed] for seed in losses if seed in base]
        low, middle, high = row["tokens_per_s"]
        cells.append(
            [
                row["variant"],
                spread(list(losses.values()), ".3f"),
                "" if losses is base else spread(beyond, "+.3f"),
                spread(list(row["bits_per_byte"].values()), ".3f"),
                f"{middle:,.0f} ({low:,.0f} to {high:,.0f})",
                f"{row['parameters']:,}",
            ]
        )
    return table(heads, cells)


def _row(
    name: str, config: RunConfig, speed: Sequence[float], trainings: Sequence[Training]
) -> dict[str, Any]:
    from nsa.model import parameter_count

    results = {str(one.seed): one.result() for one in trainings if one.variant == name}
    found = {seed: result for seed, result in results.items() if result is not None}
    return {
        "variant": name,
        "settings": list(VARIANTS[name]),
        "parameters": parameter_count(config.model),
        **{column: {seed: one[column] for seed, one in found.items()} for column in FINISHED},
        "tokens_per_s": list(speed),
    }


def _config(settings: Sequence[str]) -> RunConfig:
    """The demo of the recipe with these values."""
    from nsa.engine.resolve import resolve_config

    if not RECIPE.exists():
        raise ValueError(f"there is no {RECIPE}: run this in a clone of the repository")
    return resolve_config(runpy.run_path(str(RECIPE))["demo"](), assignments=list(settings))
