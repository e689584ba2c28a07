"""Joining and leaving the process group, under a launcher or alone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import NoReturn

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from nsa.engine.peer_hosts import interface_towards

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
# Without it gloo takes the interface that has the machine's name, which is often the loopback, and
# NCCL the first that it finds, which may be a container's.
INTERFACE = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
NEIGHBOUR_LOST = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
SECONDS_FOR_THE_CULPRIT = 5  # to say what went wrong, before those speak who only lost it


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """As the launcher says; alone without one."""
        return cls(
            int(os.environ.get("RANK", 0)),
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("WORLD_SIZE", 1)),
        )


def leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed from building its CPU op for inference. To be called before a group is joined.

    Training never calls the op, but it costs a minute of compiling, and each rank that starts it
    leaves 66 MB in /dev/shm for good: some 300 runs fill a machine's memory.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def start_ranks(ranks: Ranks) -> torch.device:
    """Join the process group and share out the machine's cores; returns this rank's device."""
    leave_out_shared_memory_op()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls the older name of this collective at every step; nothing a user can fix.
    warnings.filterwarnings("ignore", r".*all_gather_into_tensor", FutureWarning)
    for name, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)  # what stack dumps say of collectives, nothing else
    if "MASTER_ADDR" not in os.environ:  # `python recipes/m7c.py`: one process, no launcher
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    if interface := interface_towards(os.environ["MASTER_ADDR"]):  # of several machines
        for name, value in INTERFACE.items():
            os.environ.setdefault(name, value.format(interface))
    os.environ.setdefault("RANK", str(ranks.rank))
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))
    os.environ.setdefault("WORLD_SIZE", str(ranks.world_size))
    if "OMP_NUM_THREADS" not in os.environ:
        here = int(os.environ.get("LOCAL_SIZE", ranks.world_size))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    accelerator = get_accelerator()
    accelerator.set_device(ranks.local_rank)
    deepspeed.init_distributed(accelerator.communication_backend_name(), verbose=False)
    return torch.device(accelerator.device_name(ranks.local_rank))


def stop_ranks() -> NoReturn:
    """Leave the process group in good order and end the process as finished.

    A thread of the process group may outlive it on rank 0, and tearing the interpreter down then
    aborts: a run that had finished would report a failure. So nothing is torn down.
    """
    dist.barrier()
    dist.destroy_process_group()
    end_process(0)


def end_process(code: int) -> NoReturn:
    """Exit with `code` whatever threads the process group has left behind."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def crash(error: BaseException) -> NoReturn:
    """End the process with the traceback of `error`, after that of the rank that failed first.

    A rank that only lost its neighbour waits: the launcher ends it once the other has ended.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if isinstance(error, KeyboardInterrupt):
        end_process(130)
    if isinstance(error, dist.DistError) or any(sign in str(error) for sign in NEIGHBOUR_LOST):
        time.sleep(SECONDS_FOR_THE_CULPRIT)
    traceback.print_exception(error)
    end_process(1)
