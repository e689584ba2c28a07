"""`python -m nsa.bench ablations`: train the demo or M7C with parts of its attention changed.

The recipe trains every variant with every seed, which sets initial weights and data order; all are
evaluated on the same validation sequences and compared with the first variant, seed by seed.
Finished runs are kept, interrupted ones resumed.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nsa.bench import recipe
from nsa.bench.recipe import log_file, logged_rows, recipe_config
from nsa.bench.results import Report
from nsa.engine.resolve import resolve_config
from nsa.model import parameter_count
from nsa.report.markdown import mean_and_range, table
from nsa.report.paired import paired_t
from nsa.validation import whole_number_list, words_of

VARIANTS: dict[str, tuple[str, ...]] = {  # settings that differ from COMMON and the profile's
    "nsa": (),
    "dense-first": (  # as the recipe
        "attention.compressor=pool",
        "attention.selector_loss=1",
        "train.dense_steps=auto",
    ),
    "dense": ("attention.kind=dense",),
    "cmp": ("attention.branches=cmp",),
    "sel": ("attention.branches=sel",),
    "win": ("attention.branches=win",),
    "cmp+win": ("attention.branches=cmp+win",),
    "sel+win": ("attention.branches=sel+win",),
    "mlp": ("attention.compressor=mlp",),
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
    "train.eval_every=0",  # evaluate at the end only,
    "train.eval_samples=256",  # but on more validation data
    "checkpoint.keep=1",
    # NSA in all steps, φ `mean`: also where the recipe's selector learns otherwise.
    "train.dense_steps=0",
    "attention.compressor=mean",
    "attention.selector_loss=0",
)
PROFILES = {
    # One process has half of the demo's tokens per step; at its learning rate the loss spikes.
    "demo": ("train.learning_rate=1e-3", "train.min_learning_rate=1e-4"),
    # M7C on one GPU, on text that is there: 46 MB, of which 600 steps read nine tenths.
    "production": (
        "data.source=embedded:torch",
        "data.tokenizer=byte",
        "data.held_out=0.05",  # more sequences than are evaluated
        "train.micro_batch=8",
        "train.accumulation=4",
        "model.activation_checkpointing=none",
        "train.warmup_steps=60",
        "checkpoint.every=200",
        "monitor.ladder.smoke=1000000",  # a No-Go for speed must not end a comparison of losses
        "monitor.ladder.extended=2000000",
    ),
}
METRICS = "val_loss", "bits_per_byte"
MIN_SECONDS_LEFT = 60  # of --limit, to start a run
LOG_TAIL = 2_000  # characters of a failed run's log to print


@dataclass(frozen=True)
class Training:
    """One run of the recipe: a variant with a seed."""

    variant: str
    seed: int
    steps: int
    profile: str
    settings: tuple[str, ...]  # those that differ from the profile's
    folder: Path

    def result(self) -> dict[str, Any] | None:
        """Return the validation metrics of the last step; None if the run is not finished."""
        rows = logged_rows(self.folder)
        if not rows or rows[-1]["step"] != self.steps or rows[-1]["val_loss"] is None:
            return None
        return {name: rows[-1][name] for name in METRICS}

    def check(self) -> None:
        """Raise if the folder has a run with other settings."""
        file, config = self.folder / "config.yaml", recipe_config(self.profile, self.settings)
        if file.exists() and resolve_config(config, file) != config:
            raise ValueError(
                f"--runs {self.folder.parent}: {file} has different settings from this command; "
                "choose another folder, or the --steps of that run"
            )

    def train(self, end: float = math.inf) -> str | None:
        """Start or resume the run, until time.monotonic() is `end`; return its failure or None."""
        name = f"{self.variant}, seed {self.seed}"
        left = end - time.monotonic()
        if self.result():
            return None
        if left < MIN_SECONDS_LEFT:
            return f"{name} was not started: --limit reached; the same command continues"
        resume = ["--resume"] if (self.folder / "config.yaml").exists() else []
        command = [sys.executable, str(recipe.RECIPE), "--profile", self.profile, *resume]
        if left < math.inf:
            command += ["--time-limit", str(int(left))]  # saves a checkpoint
        command += ["--run-dir", str(self.folder), *(f"--set={x}" for x in self.settings)]
        log = log_file(self.folder)
        with log.open("ab") as output:
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads wait for a shared CPU
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if result := self.result():
            print(f"{name}: validation loss {result['val_loss']:.4f}", flush=True)
            return None
        if done.returncode == 0:
            return f"{name} was stopped and saved; the same command resumes it"
        failure = f"{name} ended with exit code {done.returncode}"
        print(f"{log.read_text(errors='replace')[-LOG_TAIL:]}\n{failure}", flush=True)
        return failure


def add_flags(parser: argparse.ArgumentParser) -> None:
    add, every = parser.add_argument, ",".join(VARIANTS)
    add_run_flags(parser, "runs/ablations", steps=300, jobs=2)
    add("--profile", choices=PROFILES, default="demo", help="of recipes/m7c.py (%(default)s)")
    about = "variants to train; the others are compared with the first (%(default)s)"
    add("--variants", type=words_of(*VARIANTS), default=every, help=about)
    about = "one more variant: NSA in all steps, φ mean, with these settings, separated by commas"
    add("--variant", action="append", default=[], metavar="KEY=VALUE,...", help=about)


def add_run_flags(parser: argparse.ArgumentParser, runs: str, steps: int, jobs: int) -> None:
    """Add the flags that `train_variants` reads."""
    add = parser.add_argument
    add("--runs", type=Path, default=runs, help="folder of the runs")
    add("--steps", type=int, default=steps, help="per run (%(default)s)")
    about = "of weights and data, with spaces or commas (1 2 3)"
    add("--seeds", type=whole_number_list, nargs="+", default=[[1, 2, 3]], help=about)
    about = "a setting of every run; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    add("--jobs", type=int, default=jobs, help="concurrent runs, one thread each (%(default)s)")
    add("--limit", type=float, help="stop and save after this many seconds")


def run(report: Report) -> dict[str, Any]:
    """Train the runs that are not finished; print the table and failures."""
    flags = report.flags
    variants = {name: VARIANTS[name] for name in flags.variants}
    variants |= {text: tuple(text.split(",")) for text in flags.variant}
    common = (*COMMON, *PROFILES[flags.profile], *flags.set, f"train.steps={flags.steps}")
    configs = {name: recipe_config(flags.profile, (*common, *x)) for name, x in variants.items()}
    trainings, failures = train_variants(report, flags.profile, common, variants)
    rows = []
    for name, config in configs.items():
        row = {
            "variant": name,
            "settings": list(variants[name]),
            "parameters": parameter_count(config.model),
        }
        results = {str(x.seed): x.result() for x in trainings if x.variant == name}
        for metric in METRICS:
            row[metric] = {seed: result[metric] for seed, result in results.items() if result}
        rows.append(row)
    result = {
        "profile": flags.profile,
        "steps": flags.steps,
        "seeds": [seed for group in flags.seeds for seed in group],
        "rows": rows,
        "failures": failures,
    }
    print("\n".join([*lines(result), *result["failures"]]))
    return result


def train_variants(
    report: Report, profile: str, common: tuple[str, ...], variants: Mapping[str, tuple[str, ...]]
) -> tuple[list[Training], list[str]]:
    """Train each variant with each seed, unless it is finished; return all runs, and failures."""
    flags = report.flags
    trainings = [
        Training(
            name,
            seed,
            flags.steps,
            profile,
            (*common, f"train.seed={seed}", *changes),
            flags.runs / f"{name}-seed{seed}",
        )
        for group in flags.seeds
        for seed in group
        for name, changes in variants.items()
    ]
    for training in trainings:
        training.check()
    # Ctrl-C reaches the runs too: they save a checkpoint and can be resumed.
    with ThreadPoolExecutor(flags.jobs) as pool:
        failures = [*pool.map(partial(Training.train, end=report.end), trainings)]
    return trainings, [failure for failure in failures if failure]


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the rows as a Markdown table, with a paired t test against the first row."""
    base = result["rows"][0]
    heads = ["variant", "validation loss", f"minus {base['variant']}'s (95% interval)", "p"]
    heads += ["detectable", "bits per byte", "parameters"]
    return table(heads, [_cells(row, base) for row in result["rows"]])


def _cells(row: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    loss, reference = row["val_loss"], base["val_loss"]
    differences = [loss[seed] - reference[seed] for seed in loss if seed in reference]
    tested = ["", "", ""] if row is base else [mean_and_range(differences, "+.3f"), "–", "–"]
    if test := paired_t(differences):
        tested = [f"{test.mean:+.3f} ± {test.margin:.3f}", f"{test.p:.2g}"]
        tested += [f"{test.detectable:.3f}"]
    return [
        row["variant"],
        mean_and_range(list(loss.values()), ".3f"),
        *tested,
        mean_and_range(list(row["bits_per_byte"].values()), ".3f"),
        f"{row['parameters']:,}",
    ]
