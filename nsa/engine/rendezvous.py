"""Rendezvous of the ranks of one machine: a file that only this user can reach.

    rank 0    creates <temp>/nsa-<user id>/<run>.<process>.<start>    folder 0700, file 0600
    others    wait for the file of a rank 0 that runs

PyTorch's own rendezvous is a TCP port, which obeys every user of the machine. The first
process to join is a rank. Over the file ranks exchange the loopback addresses at which they then
connect.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

POLL_SECONDS = 0.02
SCHEME = "private"  # of the init_method
_created: list[Path] = []  # by this process, if it is rank 0


def private_folder() -> Path:
    """Return a folder of this user in the temporary directory; refuse another user's."""
    folder = Path(tempfile.gettempdir()) / f"nsa-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()  # anyone can create this name, also as a link
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not own or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"{folder}: is not a folder that only you can enter, so another user could join the "
            "run; remove it, or set TMPDIR to a folder of yours"
        )
    return folder


def run_name() -> str:
    """Return what the ranks of this run have in common: launcher and port.

    Without DeepSpeed's launcher ranks may have several parents.
    """
    port = os.environ["MASTER_PORT"]
    launcher = os.getppid() if "CROSS_RANK" in os.environ else 0
    return f"{launcher}-{port}"


def create_rendezvous(run: str) -> Path:
    """Create the file at which the other ranks of `run` meet this process, rank 0."""
    folder = private_folder()
    for other in folder.glob(f"{run}.*"):
        if _creator_runs(other):
            _, port, process, _ = other.name.replace("-", ".").split(".")
            raise ValueError(
                f"--master_port {port}: in use by another run, process {process}; choose another "
                "with deepspeed --master_port"
            )
        other.unlink(missing_ok=True)
    path = folder / f"{run}.{os.getpid()}.{_start_time(os.getpid())}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    _created.append(path)
    return path


def find_rendezvous(run: str, timeout: timedelta) -> Path:
    """Wait for the file of the rank 0 of `run`, and return it."""
    folder, deadline = private_folder(), time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        for path in folder.glob(f"{run}.*"):
            if _creator_runs(path):
                return path
        time.sleep(POLL_SECONDS)
    raise ValueError(f"{folder}: rank 0 did not come within {timeout}; read its error")


def _creator_runs(path: Path) -> bool:
    _, process, start = path.name.split(".")
    return _start_time(int(process)) == start


def _start_time(process: int) -> str | None:
    """Return a process's start in ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _rendezvous(_: str, timeout: timedelta, **__: Any) -> Iterator[tuple[Any, int, int]]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = find_rendezvous(run_name(), timeout) if rank else create_rendezvous(run_name())
    store = dist.FileStore(str(path), world_size)
    store.set_timeout(timeout)
    yield store, rank, world_size
    raise RuntimeError("rendezvous ran twice; a run joins its ranks once")


def remove_rendezvous() -> None:
    """Remove what this process created, as it ends."""
    for path in _created:
        path.unlink(missing_ok=True)


dist.register_rendezvous_handler(SCHEME, _rendezvous)
