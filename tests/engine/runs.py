"""Helpers that run a recipe with a user's flags, on one real rank or two, and read its losses.

No launcher: the fork server starts the ranks, which saves seconds per run. DeepSpeed's launcher is
used in tests/faults/test_node.py.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.checkpoint.weights import read_weights
from nsa.data.cache import TokenCache, ValidationData, cache_folder
from nsa.data.dataset import open_dataset
from nsa.engine.config import RunConfig
from nsa.engine.load_run import StoredRun
from nsa.engine.plan_command import load_recipe
from nsa.monitor.artifacts import read_table
from nsa.monitor.observer import METRICS_COLUMNS
from tests.ranks import ROOT, spawn_ranks

BIN = Path(sys.executable).parent
LIMIT = 300.0  # seconds until a run counts as hung
_tokens = tempfile.TemporaryDirectory(prefix="tokens-")
# A tiny model on the code path of the demo, in the precision of production.
TINY = [
    f"--set={setting}"
    for setting in (
        "model.layers=2",
        "model.width=48",
        "model.heads=6",
        "model.kv_heads=1",
        "model.head_dim=8",
        "model.mlp_width=64",
        "data.seq_len=96",
        "train.eval_every=4",
        "train.eval_samples=8",
        "train.warmup_steps=2",
        "checkpoint.every=3",
        "train.precision=bf16",
        f"data.cache={_tokens.name}",  # tokenized once for all runs
    )
]
Finished = subprocess.CompletedProcess[str]


def _run(recipe: str, *arguments: str, folder: Path, ranks: int, **options: Any) -> Finished:
    """Run a recipe in `folder`, without a launcher; `options`: of spawn_ranks."""
    program = ROOT / "recipes" / recipe
    run = spawn_ranks(program, *arguments, folder=folder, ranks=ranks, **options)
    try:
        failed = run.wait_for_failure(time.monotonic() + LIMIT)
        codes = run.codes()
        assert failed is not None or None not in codes, f"still running:\n{run.text('err')[-3000:]}"
    finally:
        run.end()
    code = 0 if failed is None else (codes[failed] or 0) % 256
    return Finished([recipe, *arguments], code, run.text("out"), run.text("err"))


on_one_rank = partial(_run, ranks=0)
on_two_ranks = partial(_run, ranks=2)


def succeed(result: Finished) -> str:
    """Return the stdout of a run that exited with 0; fail otherwise."""
    assert result.returncode == 0, result.stdout[-3_000:] + result.stderr[-3_000:]
    return result.stdout


def refused(result: Finished) -> str:
    """Return the last line of a run that was refused with exit code 2; fail otherwise."""
    assert result.returncode == 2, result.stdout[-3_000:] + result.stderr[-3_000:]
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def ds_config(name: str) -> str:
    """Return the flag that names a shipped DeepSpeed config."""
    return f"--deepspeed_config={ROOT}/ds_configs/{name}.json"


def weights(run_dir: Path, step: int) -> dict[str, Tensor]:
    """Return the master weights in the checkpoint of a step."""
    return read_weights(run_dir / "checkpoints" / f"step{step:08d}", torch.float32)


def cut_back(run_dir: Path, step: int, copy: Path) -> Path:
    """Copy a run as it was when it saved `step`; a copy shows what is computed again."""
    shutil.copytree(run_dir, copy)
    for checkpoint in (copy / "checkpoints").glob("step*"):
        if checkpoint.name > f"step{step:08d}":
            shutil.rmtree(checkpoint)
    (copy / "checkpoints/latest").write_text(f"step{step:08d}")
    header, *rows = (copy / "metrics.csv").read_text().splitlines(keepends=True)
    (copy / "metrics.csv").write_text("".join([header, *rows[:step]]))
    return copy


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """Return the rows of a run's metrics.csv, oldest first; an empty cell is None."""
    rows = read_table(run_dir / "metrics.csv").rows
    return [{column: row.get(column) for column in METRICS_COLUMNS} for row in rows]


def validation_loss(loaded: StoredRun, run_dir: Path) -> float:
    """Return the loss of a loaded model on the validation samples of its run."""
    config, samples = loaded.config, loaded.config.train.eval_samples
    cache = TokenCache(open_dataset(config.data), cache_folder(config.data, run_dir))
    validation = ValidationData(cache, sequences=samples, micro_batch=samples, world_size=1)
    (batch,) = validation.batches(0)
    with torch.no_grad():
        return loaded.model(batch.input_ids, labels=batch.labels).item()


def losses(run_dir: Path) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in read_metrics(run_dir)}


def load_profile(recipe: str, profile: str) -> RunConfig:
    """Return the config of a profile of a file in recipes/."""
    return load_recipe(ROOT / f"recipes/{recipe}.py", profile).profiles[profile]()
