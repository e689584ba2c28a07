"""Runs a Python file on several processes, one per rank, as a launcher does."""

import atexit
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.fork_server import Connection, Forked, Server

ROOT = Path(__file__).parents[1]
TAIL = 4_000  # characters of a rank's stderr and stdout that a failure shows
PATIENCE = 60.0  # seconds until a wait that should be short has failed
GRACE = 3.0  # seconds for the other ranks to end after one failed
SET_BY_LAUNCHER = (
    *("RANK", "CROSS_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
# DeepSpeed defines Muon's functions with torch.compile, whose import takes a rank 1.4 s.
WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}

shared_server: str | None = None  # the address of the fork server of all workers of pytest-xdist


class RanksFailed(AssertionError):
    """A rank failed or timed out; the message ends with the last output of each rank."""


def free_port() -> int:
    """Return a free TCP port below the ephemeral range, so that it stays free for a restart."""
    for port in random.SystemRandom().sample(range(10_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports is free")


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], object], log: Callable[[], str] = str) -> None:
    """Wait until a condition holds; a failure shows the log."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"the condition was never met\n{log()}"
        time.sleep(0.005)


def user_environment() -> dict[str, str]:
    """Return a user's shell environment: ours without the launcher's and Triton's variables."""
    excluded = ("TRITON_INTERPRET", *SET_BY_LAUNCHER)
    return {name: value for name, value in os.environ.items() if name not in excluded}


@dataclass
class SpawnedRanks:
    """Started processes, in the order of the ranks."""

    started: list[Forked]

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.started]

    def codes(self, timeout: float = 0.0) -> list[int | None]:
        """Return exit codes, negative for signals; None for ranks that run after `timeout`."""
        deadline = time.monotonic() + timeout
        return [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self.started]

    def wait_for_failure(self, deadline: float) -> int | None:
        """Return the first rank that fails; None if all ended well or time is up."""
        while time.monotonic() < deadline:
            codes = self.codes()
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed or None not in codes:
                return failed[0] if failed else None
            self.started[codes.index(None)].wait(0.05)
        return None

    def end(self, first: int = signal.SIGTERM, grace: float = 30.0) -> None:
        """Signal ranks that still run; after `grace` kill them and all that they started."""
        for rank in self.started:
            rank.kill(first)
        self.codes(grace)
        for rank in self.started:
            rank.kill_group()
        self.codes(grace)

    def text(self, stream: str) -> str:
        """Return what all ranks wrote to "out" or "err", one rank after the other."""
        return "".join(rank.text(stream) for rank in self.started)


@cache
def server_address() -> str:
    """Return the address of a fork server that ends with this process."""
    server = Server(preload=not torch.cuda.is_available())
    atexit.register(server.close)
    return server.address


@cache
def _connection() -> Connection:
    connection = Connection(shared_server or server_address())
    atexit.register(connection.close)
    return connection


@cache
def _outputs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="outputs-of-ranks-")


_numbers = itertools.count()


def spawn_ranks(
    program: Path,
    *arguments: str,
    folder: Path | None = None,
    ranks: int = 2,
    port: int | None = None,
    environment: dict[str, str] | None = None,
) -> SpawnedRanks:
    """Start a program on `ranks` processes; 0: on one, without a launcher's variables."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    common |= {"CROSS_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    started = []
    for rank in range(max(1, ranks)):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common} if ranks else {}
        variables |= {"OMP_NUM_THREADS": "1", **(environment or {})}
        started.append(
            _connection().start(
                program,
                *arguments,
                folder=folder or Path.cwd(),
                output=Path(_outputs().name) / str(next(_numbers)),
                env=user_environment() | variables,
            )
        )
    return SpawnedRanks(started)


def run_forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Replace subprocess.run of [Python, program, *arguments], without the seconds of imports."""
    program, *arguments = command[1:]
    forked = spawn_ranks(Path(program), *arguments, ranks=0).started[0]
    try:
        code = forked.wait()
    finally:
        forked.kill_group()
    options["stdout"].write((forked.text("out") + forked.text("err")).encode())
    return subprocess.CompletedProcess(command, code or 0)


FORKING = SimpleNamespace(run=run_forked, DEVNULL=None, STDOUT=None)  # for the module subprocess


def launch_rows(program: Path, *arguments: str, timeout: float = 300) -> list[list[dict[str, Any]]]:
    """Run a program on two ranks and return the JSON objects that each one prints, one a line."""
    texts = launch(program, *arguments, timeout=timeout)
    return [[json.loads(line) for line in text.splitlines() if line[:1] == "{"] for text in texts]


def launch(
    program: Path,
    *arguments: str,
    world_size: int = 2,
    timeout: float = 300,
    port: int | None = None,
) -> list[str]:
    """Run a program on `world_size` ranks and return each one's stdout."""
    ranks = spawn_ranks(program, *arguments, ranks=world_size, port=port)
    try:
        failed = ranks.wait_for_failure(time.monotonic() + timeout)
        codes = ranks.codes(0 if failed is None else GRACE)
    finally:
        ranks.end(signal.SIGKILL)
    if failed is not None:
        problem = f"rank {failed} failed with exit code {codes[failed]}"
    elif None in codes:
        running = [rank for rank, code in enumerate(codes) if code is None]
        problem = f"after {timeout:g} s these ranks still ran: {running}"
    else:
        return [rank.text("out") for rank in ranks.started]
    tails = (
        f"--- rank {rank}, exit code {process.wait(0)}, stderr:\n{process.text('err')[-TAIL:]}"
        f"--- rank {rank}, stdout:\n{process.text('out')[-TAIL:]}"
        for rank, process in enumerate(ranks.started)
    )
    raise RanksFailed("\n".join((f"{program.name}: {problem}", *tails)))
