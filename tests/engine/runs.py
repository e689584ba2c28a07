"""Starting recipes as users do, and reading what they leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nsa.monitor.metrics_csv import read_metrics
from tests.ranks import ROOT, free_port, started_programs_environment

BIN = Path(sys.executable).parent
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
    )
]


def deepspeed(
    recipe: str, *arguments: str, folder: Path, port: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Start a recipe on two ranks as a user would, in `folder`."""
    command = [BIN / "deepspeed", "--num_gpus", "2", "--master_port", str(port or free_port())]
    return run([*map(str, command), str(ROOT / "recipes" / recipe), *arguments], folder)


def alone(
    recipe: str, *arguments: str, folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Start a recipe in one process, without the launcher."""
    command = [sys.executable, str(ROOT / "recipes" / recipe), *arguments]
    return run(command, folder, environment or {})


def run(
    command: list[str], folder: Path, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = started_programs_environment() | {"OMP_NUM_THREADS": "1"} | (more or {})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def succeed(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stdout[-3_000:] + result.stderr[-3_000:]
    return result.stdout


def losses(run_dir: Path) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in read_metrics(run_dir / "metrics.csv")}
