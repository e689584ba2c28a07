"""Two ranks; rank 1 joins a collective only after it has seen rank 0 waiting in it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # as recipes do, before the process group exists

import torch
import torch.distributed as dist

from nsa.monitor.artifacts import last_beat
from nsa.monitor.heartbeat import Heartbeat, dump_stacks_on_signal


def reduce_gradients(values: torch.Tensor) -> None:
    dist.all_reduce(values)


def watch(run_dir: Path) -> None:
    """Signal rank 0 from outside, as the watchdog does, until its record has the collective."""
    record = run_dir / "stacks/rank0_collectives.json"
    while not record.exists() or '"retired": false' not in record.read_text():
        beat = last_beat(run_dir / "heartbeat_rank0.jsonl")
        if beat and beat["phase"] == "backward":
            os.kill(beat["pid"], signal.SIGUSR1)
        time.sleep(0.5)


def main(run_dir: Path) -> None:
    dist.init_process_group("gloo")
    rank, values = dist.get_rank(), torch.ones(1000)
    beat = Heartbeat(run_dir, rank=rank, backend="deepspeed-zero1", seconds=0.05)
    dump_stacks_on_signal(run_dir, rank)
    for _ in range(3):
        reduce_gradients(values)
    beat.enter("backward")
    if rank == 1:
        watch(run_dir)
    reduce_gradients(values)
    assert values[0] == 2**4
    beat.close("finished")
    dist.destroy_process_group()
    os._exit(0)  # a thread of the process group can abort the interpreter's shutdown


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
