"""Runs a Python file on several real processes, as a launcher would, for tests that need ranks."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import random
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tests.fork_server import Forked, Server

ROOT = Path(__file__).parents[1]
TAIL = 4_000  # characters of a rank's stderr and stdout that a failure shows
GRACE = 3.0  # seconds that the others get to end by themselves once one rank has failed
TOLD_BY_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RanksFailed(AssertionError):
    """A rank failed or time ran out; the message ends with what each rank wrote last."""


def free_port() -> int:
    """A TCP port of this machine that nobody listens on.

    It lies below those that the system itself gives out, to anyone who connects to anything: a run
    that is started again needs its port a second time.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports is free")


def started_programs_environment() -> dict[str, str]:
    """Ours as a shell has it: tests of kernels use Triton's interpreter, users' programs do not."""
    ours = ("TRITON_INTERPRET", *TOLD_BY_LAUNCHER)
    return {name: value for name, value in os.environ.items() if name not in ours}


@dataclass
class Ranks:
    """The processes of a run."""

    started: list[Forked]

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [rank.pid for rank in self.started]

    def codes(self, timeout: float = 0.0) -> list[int | None]:
        """The exit code of each rank, negative for a signal; None where one still runs then."""
        deadline = time.monotonic() + timeout
        return [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self.started]

    def wait_for_failure(self, deadline: float) -> int | None:
        """The first rank that fails; None where none has when all ended, or time was up."""
        while time.monotonic() < deadline:
            codes = self.codes()
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed or None not in codes:
                return failed[0] if failed else None
            self.started[codes.index(None)].wait(0.05)
        return None

    def end(self, first: int = signal.SIGTERM, grace: float = 30.0) -> None:
        """End what still runs, gently and then not, and all that it started."""
        for rank in self.started:
            rank.kill(first)
        self.codes(grace)
        for rank in self.started:
            rank.kill_group()
        self.codes(grace)

    def text(self, stream: str) -> str:
        """What all ranks have written to "out" or "err", one rank after the other."""
        return "".join(rank.text(stream) for rank in self.started)


@cache
def _server() -> Server:
    server = Server(preload=not torch.cuda.is_available())
    atexit.register(server.close)
    return server


@cache
def _outputs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="outputs-of-ranks-")


_numbers = itertools.count()


def start_ranks(
    program: Path,
    *arguments: str,
    folder: Path | None = None,
    ranks: int = 2,
    port: int | None = None,
    environment: dict[str, str] | None = None,
) -> Ranks:
    """Start a program on so many ranks; 0: in one process, told of no rank.

    Every rank is the head of a process group of its own.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    started = []
    for rank in range(max(1, ranks)):
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common} if ranks else {}
        told |= {"OMP_NUM_THREADS": "1", **(environment or {})}
        started.append(
            _server().start(
                program,
                *arguments,
                folder=folder or Path.cwd(),
                output=Path(_outputs().name) / str(next(_numbers)),
                env=started_programs_environment() | told,
            )
        )
    return Ranks(started)


def launch(code_path: Path, *args: str, world_size: int = 2, timeout: float = 300) -> list[str]:
    """Run `python code_path *args` on `world_size` ranks and return each one's stdout."""
    ranks = start_ranks(code_path, *args, ranks=world_size)
    try:
        failed = ranks.wait_for_failure(time.monotonic() + timeout)
        codes = ranks.codes(0 if failed is None else GRACE)
    finally:
        ranks.end(signal.SIGKILL)
    if failed is not None:
        what = f"rank {failed} failed with exit code {codes[failed]}"
    elif None in codes:
        alive = [rank for rank, code in enumerate(codes) if code is None]
        what = f"after {timeout:g} s these ranks still ran: {alive}"
    else:
        return [rank.text("out") for rank in ranks.started]
    tails = (
        f"--- rank {rank}, exit code {process.wait(0)}, stderr:\n{process.text('err')[-TAIL:]}"
        f"--- rank {rank}, stdout:\n{process.text('out')[-TAIL:]}"
        for rank, process in enumerate(ranks.started)
    )
    raise RanksFailed("\n".join((f"{code_path.name}: {what}", *tails)))
