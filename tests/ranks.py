"""Runs a Python file on several real processes, as a launcher would, for tests that need ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TAIL = 4_000  # characters of a rank's stderr and stdout that a failure shows
GRACE = 3.0  # seconds that the others get to end by themselves once one rank has failed


class RanksFailed(AssertionError):
    """A rank failed or time ran out; the message ends with what each rank wrote last."""


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started_programs_environment() -> dict[str, str]:
    """Ours without Triton's interpreter: tests of kernels use it, users' programs do not."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def launch(code_path: Path, *args: str, world_size: int = 2, timeout: float = 300) -> list[str]:
    """Run `python code_path *args` on `world_size` ranks and return each one's stdout.

    Every rank is the head of a process group of its own, which ends with this call.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        port = free_port()
        try:
            for rank in range(world_size):
                with (
                    open(f"{folder}/{rank}.out", "wb") as out,
                    open(f"{folder}/{rank}.err", "wb") as err,
                ):
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, "-u", str(code_path), *args],
                            env=_environment(rank, world_size, port),
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err,
                            start_new_session=True,
                        )
                    )
            what = _wait(ranks, timeout)
        finally:
            for process in ranks:
                _end_group(process)
        out, err = (
            [Path(f"{folder}/{rank}.{kind}").read_text() for rank in range(world_size)]
            for kind in ("out", "err")
        )
        if what is None:
            return out
        tails = (
            f"--- rank {rank}, exit code {process.returncode}, stderr:\n{err[rank][-TAIL:]}"
            f"--- rank {rank}, stdout:\n{out[rank][-TAIL:]}"
            for rank, process in enumerate(ranks)
        )
        raise RanksFailed("\n".join((f"{code_path.name}: {what}", *tails)))


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    inherited = started_programs_environment()
    return {
        **inherited,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH")))),
    }


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> str | None:
    """Wait for every rank; None where all succeeded, else what went wrong first."""
    deadline = time.monotonic() + timeout
    failure: str | None = None
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failure is None and failed:
            failure = f"rank {failed[0]} failed with exit code {codes[failed[0]]}"
            deadline = min(deadline, time.monotonic() + GRACE)
        if None not in codes:
            return failure
        if time.monotonic() > deadline:
            alive = [rank for rank, code in enumerate(codes) if code is None]
            return failure or f"after {timeout:g} s these ranks still ran: {alive}"
        time.sleep(0.02)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a rank, its children included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
