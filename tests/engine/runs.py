"""Starting recipes as users do, and reading what they leave behind.

`launched` starts them as a user's shell does. `deepspeed` and `alone` fork them from a process
that has imported their modules: they are told and tell the same, many seconds sooner.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from nsa.monitor.metrics_csv import read_metrics
from tests.ranks import ROOT, free_port, start_ranks, user_environment

BIN = Path(sys.executable).parent
LIMIT = 300.0  # seconds that a run may take
# The demo made tiny: seconds on a busy machine, the same path through the house.
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
        "monitor.report=false",  # seconds of drawing; the tests of the report ask for it
    )
]
Finished = subprocess.CompletedProcess[str]


def launched(recipe: str, *arguments: str, folder: Path, port: int | None = None) -> Finished:
    """Start a recipe on two ranks with DeepSpeed's launcher, as a user does, in `folder`."""
    command = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(port or free_port())]
    return subprocess.run(
        [*command, str(ROOT / "recipes" / recipe), *arguments],
        cwd=folder,
        env=user_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def deepspeed(recipe: str, *arguments: str, folder: Path, port: int | None = None) -> Finished:
    """What `launched` gives, from ranks that are looked after here as the launcher does it."""
    return _forked(recipe, arguments, folder, 2, port, None)


def alone(
    recipe: str, *arguments: str, folder: Path, environment: dict[str, str] | None = None
) -> Finished:
    """Run a recipe in one process, without a launcher."""
    return _forked(recipe, arguments, folder, 0, None, environment)


def _forked(
    recipe: str,
    arguments: tuple[str, ...],
    folder: Path,
    ranks: int,
    port: int | None,
    environment: dict[str, str] | None,
) -> Finished:
    run = start_ranks(
        ROOT / "recipes" / recipe,
        *arguments,
        folder=folder,
        ranks=ranks,
        port=port,
        environment=environment,
    )
    try:
        failed = run.wait_for_failure(time.monotonic() + LIMIT)
        codes = run.codes()
        assert failed is not None or None not in codes, f"still running:\n{run.text('err')[-3000:]}"
    finally:
        run.end()
    code = 0 if failed is None else (codes[failed] or 0) % 256
    return Finished([recipe, *arguments], code, run.text("out"), run.text("err"))


def succeed(result: Finished) -> str:
    """What a run said that ended well."""
    assert result.returncode == 0, result.stdout[-3_000:] + result.stderr[-3_000:]
    return result.stdout


def losses(run_dir: Path) -> dict[int, float]:
    """The logged loss of each step."""
    return {int(row["step"]): row["loss"] for row in read_metrics(run_dir / "metrics.csv")}
