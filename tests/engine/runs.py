"""Starting recipes as users do, and reading what they leave behind.

`deepspeed` and `alone` start them as a user's shell does. The other functions fork them from a
process that has imported their modules, and are told and tell the same, many seconds sooner.
"""

from __future__ import annotations

import atexit
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from nsa.monitor.metrics_csv import read_metrics
from tests.fork_server import Forked, Server
from tests.ranks import ROOT, free_port, started_programs_environment

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
    )
]
TOLD_BY_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")

Finished = subprocess.CompletedProcess[str]


def launched(recipe: str, *arguments: str, folder: Path, port: int | None = None) -> Finished:
    """Start a recipe on two ranks with DeepSpeed's launcher, as a user does, in `folder`."""
    command = [BIN / "deepspeed", "--num_gpus", "2", "--master_port", str(port or free_port())]
    return run([*map(str, command), str(ROOT / "recipes" / recipe), *arguments], folder)


def run(command: list[str], folder: Path, more: dict[str, str] | None = None) -> Finished:
    """Run a command to its end, in an environment that knows of no launcher."""
    return subprocess.run(
        command,
        cwd=folder,
        env=_environment(more),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def deepspeed(recipe: str, *arguments: str, folder: Path, port: int | None = None) -> Finished:
    """What `launched` gives, from ranks that this process looks after as the launcher does."""
    ranks = start_ranks(recipe, *arguments, folder=folder, port=port)
    code = ranks.look_after(LIMIT)
    return Finished([recipe, *arguments], code, ranks.output("out"), ranks.output("err"))


def alone(
    recipe: str, *arguments: str, folder: Path, environment: dict[str, str] | None = None
) -> Finished:
    """Run a recipe in one process, without a launcher."""
    ranks = start_ranks(recipe, *arguments, folder=folder, ranks=0, environment=environment)
    code = ranks.look_after(LIMIT)
    return Finished([recipe, *arguments], code, ranks.output("out"), ranks.output("err"))


@dataclass
class Ranks:
    """The processes of a run."""

    started: list[Forked]

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [rank.pid for rank in self.started]

    def wait(self, timeout: float = LIMIT) -> list[int | None]:
        """The exit code of each rank, negative for a signal; None where one runs on after that."""
        deadline = time.monotonic() + timeout
        return [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self.started]

    def look_after(self, timeout: float = LIMIT) -> int:
        """End all ranks where one fails, as the launcher does; returns the launcher's exit code."""
        deadline = time.monotonic() + timeout
        while None in (codes := self.wait(0)) and not any(codes):
            assert time.monotonic() < deadline, f"still running:\n{self.output('err')[-3_000:]}"
            self.started[codes.index(None)].wait(0.05)
        failed = next((code for code in codes if code), 0)
        self.end(signal.SIGTERM)
        return failed % 256

    def end(self, first: int = signal.SIGKILL, grace: float = 30.0) -> None:
        """End what still runs."""
        for number in (first, signal.SIGKILL):
            for rank in self.started:
                rank.kill(number)
            if None not in self.wait(grace):
                return

    def output(self, stream: str) -> str:
        """What all ranks have written to "out" or "err", one rank after the other."""
        return "".join(rank.text(stream) for rank in self.started)


_numbers = itertools.count()


@cache
def _server() -> Server:
    server = Server(preload=not torch.cuda.is_available())
    atexit.register(server.close)
    return server


@cache
def _outputs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="outputs-of-ranks-")


def start_ranks(
    program: str | Path,
    *arguments: str,
    folder: Path,
    ranks: int = 2,
    port: int | None = None,
    environment: dict[str, str] | None = None,
) -> Ranks:
    """Start a recipe, or another program, on so many ranks; 0: in one process, told of no rank."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    started = []
    for rank in range(max(1, ranks)):
        told, flags = {}, list(arguments)
        if ranks:
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
            told |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
            flags.insert(0, f"--local_rank={rank}")
        started.append(
            _server().start(
                ROOT / "recipes" / program,
                *flags,
                folder=folder,
                output=Path(_outputs().name) / str(next(_numbers)),
                env=_environment(told | (environment or {})),
            )
        )
    return Ranks(started)


def _environment(more: dict[str, str] | None) -> dict[str, str]:
    environment = started_programs_environment() | {"OMP_NUM_THREADS": "1"}
    for name in TOLD_BY_LAUNCHER:
        environment.pop(name, None)
    return environment | (more or {})


def succeed(result: Finished) -> str:
    """What a run said that ended well."""
    assert result.returncode == 0, result.stdout[-3_000:] + result.stderr[-3_000:]
    return result.stdout


def losses(run_dir: Path) -> dict[int, float]:
    """The logged loss of each step."""
    return {int(row["step"]): row["loss"] for row in read_metrics(run_dir / "metrics.csv")}
