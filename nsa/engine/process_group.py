"""Ranks of a run: join the process group, exchange values over CPUs, leave, exit with a code.

Ranks that DeepSpeed's launcher starts on one machine meet at a file in a folder that only this user
can enter, and exchange the loopback addresses at which they connect. PyTorch's own rendezvous is a
TCP port, at which any user of the machine could join as a rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from pydantic import TypeAdapter, ValidationError

from nsa.data.writer import WorkerDied
from nsa.engine import disable_shared_memory_op
from nsa.system import LOOPBACK, interface_towards

# Parts of the error messages of a rank whose peer has exited.
PEER_LOST = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
ROOT_CAUSE_GRACE_SECONDS = 5  # for the rank that failed first to report before its peers do
SCHEME = "private"  # of the rendezvous' init_method
PEER_TIMEOUT = timedelta(minutes=30)  # added to CpuCollectives' max_seconds
T = TypeVar("T")
_rendezvous_files: list[Path] = []  # on rank 0, which removes them at the end


@dataclass(frozen=True)
class Ranks:
    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read the launcher's variables; a single rank without a launcher."""
        return cls(
            int(os.environ.get("RANK", 0)),
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("WORLD_SIZE", 1)),
        )


def start_ranks(ranks: Ranks) -> torch.device:
    """Join the process group and divide the CPU cores among local ranks; return the device."""
    disable_shared_memory_op()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls the deprecated name of this collective at every step.
    warnings.filterwarnings("ignore", r".*all_gather_into_tensor", FutureWarning)
    defaults = {  # without a launcher: `python recipes/m7c.py`
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.local_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "MASTER_ADDR": LOOPBACK[0],
        "MASTER_PORT": "29500",  # DeepSpeed requires one; a single rank opens no port
    }
    os.environ.update(defaults | os.environ)
    # By default gloo uses the interface of the host name, often the loopback, and NCCL the first
    # one, maybe a container's.
    if interface := interface_towards(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": no prefix of a name
    if "OMP_NUM_THREADS" not in os.environ:
        local_ranks = int(os.environ.get("LOCAL_SIZE", ranks.world_size))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    accelerator = get_accelerator()
    accelerator.set_device(ranks.local_rank)
    _join(ranks, accelerator.communication_backend_name())
    return torch.device(accelerator.device_name(ranks.local_rank))


def _join(ranks: Ranks, backend: str) -> None:
    launched = "CROSS_RANK" in os.environ  # set by DeepSpeed's launcher
    elastic = "TORCHELASTIC_RUN_ID" in os.environ  # set by torchrun, whose ranks may join again
    local = os.environ["MASTER_ADDR"] in LOOPBACK
    private = local and not elastic and (launched or ranks.world_size == 1)
    try:
        deepspeed.init_distributed(
            backend,
            verbose=False,
            init_method=f"{SCHEME}://" if private else None,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    except (OSError, dist.DistNetworkError) as error:
        if "address already in use" not in str(error).lower():
            raise
        raise ValueError(
            f"--master_port {os.environ['MASTER_PORT']}: already in use, maybe by another run; "
            "choose another port with deepspeed --master_port"
        ) from None


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


def rendezvous_file() -> Path:
    """Return the file at which the ranks of a run meet, named after their launcher and port.

    The launcher's start time distinguishes it from an earlier process with its id.
    """
    launcher, port = os.getppid(), os.environ["MASTER_PORT"]
    start = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]  # in ticks
    return private_folder() / f"{launcher}.{start}.{port}"


def _rendezvous(_: str, timeout: timedelta, **__: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield once (store, rank, world size), as PyTorch asks of a rendezvous handler."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        path = rendezvous_file()
        store = dist.FileStore(str(path), world_size)
        if rank == 0:
            _rendezvous_files.append(path)
    store.set_timeout(timeout)
    yield store, rank, world_size


dist.register_rendezvous_handler(SCHEME, _rendezvous)


class AllRanksError(ValueError):
    """An error raised by all ranks at the same point, so that they can still save together."""


class AllRanksCrash(AllRanksError):
    """An AllRanksError that no setting causes: a restart may succeed."""


class RunAborted(Exception):
    """A No-Go, raised by all ranks together; the weights are intact."""


class CpuCollectives:
    """Collectives of a few bytes between CPUs; none waits for a GPU."""

    def __init__(self, max_seconds: float) -> None:
        """`max_seconds`: the longest time between two barriers on a healthy rank."""
        self._group = None
        if dist.get_world_size() > 1:
            timeout = PEER_TIMEOUT + timedelta(seconds=max_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def barrier(
        self, error: ValueError | None = None, stop: str | None = None, number: int = 0
    ) -> tuple[str | None, int]:
        """Wait for all ranks; return any rank's reason to stop, and the sum of all `number`s.

        Raise any rank's error on all: if only one raised or stopped, the others would wait for it.
        """
        crashed = isinstance(error, WorkerDied)
        sums = torch.tensor([error is not None, crashed, stop is not None, number])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        failed, crashes, stopped, total = sums.tolist()
        if not failed and not stopped:
            return None, total
        own = (None if error is None else str(error), stop)
        by_rank = self.gather(own, tuple[str | None, str | None])
        if errors := [message for message, _ in by_rank if message is not None]:
            error_type = AllRanksCrash if crashes else AllRanksError
            raise error_type("; ".join(dict.fromkeys(errors))) from error
        if self._group is None:
            return stop, total
        reasons = (f"{reason} on rank {r}" for r, (_, reason) in enumerate(by_rank) if reason)
        return next(reasons), total

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return every rank's value, in the order of the ranks, on every rank.

        `kind` is the type of the values. They travel as JSON: a pickle would let a process that
        takes a rank's place run code.
        """
        if self._group is None:
            return [value]
        adapter = TypeAdapter(kind)
        text = json.dumps(adapter.dump_python(value, mode="json")).encode()
        size = torch.tensor([len(text)])
        sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, size, group=self._group)
        buffer = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        buffers = [torch.empty_like(buffer) for _ in sizes]
        dist.all_gather(buffers, buffer, group=self._group)
        values = []
        for rank, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
            received = buffer.numpy().tobytes()
            try:
                values.append(adapter.validate_json(received[: int(size)]))
            except ValidationError:
                raise ValueError(
                    f"rank {rank} sent {received[:20]!r}… instead of {kind}: it is no rank of this "
                    "run, or runs other code; start the run again"
                ) from None
        return values


def stop_ranks() -> NoReturn:
    """Wait for all ranks, leave the process group and exit with code 0.

    Skip the interpreter's shutdown: a thread of the process group can abort it on rank 0, and a
    finished run would count as failed.
    """
    dist.barrier()
    dist.destroy_process_group()
    end_process(0)


def end_process(code: int) -> NoReturn:
    """Exit with `code` without waiting for threads."""
    for path in _rendezvous_files:
        path.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def crash(error: BaseException) -> NoReturn:
    """Print the traceback of `error` and exit with code 1.

    A rank that only lost its peer waits first: the launcher ends it once the peer has exited, so
    only the traceback of the root cause is printed.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # end this process also while it waits below
    if isinstance(error, KeyboardInterrupt):
        end_process(130)
    if isinstance(error, dist.DistError) or any(sign in str(error) for sign in PEER_LOST):
        time.sleep(ROOT_CAUSE_GRACE_SECONDS)
    traceback.print_exception(error)
    end_process(1)
