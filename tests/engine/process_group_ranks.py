"""On two ranks: join the process group, then rank 1 stops, passes an error and sends a pickle.

Each prints, where the user set nothing, the number of threads and the addresses on which it
listens; then what it sees of the other. Argument: the file that the pickle would create.
"""

import contextlib
import math
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from nsa.data.writer import WorkerDied
from nsa.engine.process_group import AllRanksCrash, CpuCollectives, Ranks, end_process, start_ranks
from nsa.engine.resume import agree_on_run
from tests.checkpoint.planted_code import Code

LISTEN = "0A"  # of /proc/net/tcp


class Entry(NamedTuple):
    path: Path | None
    size: float


def addresses() -> list[str]:
    """Return the local addresses, hexadecimal, of this process's listening sockets."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor of this listing
            continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in own]


os.environ.pop("OMP_NUM_THREADS")
os.environ["LOCAL_SIZE"] = str(1 + int(os.environ["RANK"]))  # as on two machines
start_ranks(Ranks.from_environment())
dist.all_reduce(torch.ones(1))  # ranks connect to each other
print(torch.get_num_threads())
print("listening:", *addresses())
collectives, rank = CpuCollectives(max_seconds=60), dist.get_rank()
assert collectives._group is not None
options = collectives._group._get_backend(torch.device("cpu")).options
assert options._timeout == timedelta(minutes=31), "half an hour after the slowest healthy rank"
collectives.barrier(None)
print("passed")
stop, total = collectives.barrier(number=2**40 + rank)
print("sum:", total - 2**41, stop)
stop, _ = collectives.barrier(None, "SIGTERM" if rank else None, 5)
print("stop:", stop)
try:
    error = ValueError("rank 1 got no batch") if rank == 1 else None
    collectives.barrier(error)
except ValueError as raised:
    print("crash" if isinstance(raised, AllRanksCrash) else "raised:", raised)
try:
    collectives.barrier(WorkerDied("killed") if rank == 1 else ValueError("no batch"))
except AllRanksCrash as crash:
    print("crash:", crash)
own = Entry(Path("ä" * 50), math.inf) if rank else Entry(None, 0.5)
print("gathered:", *collectives.gather([own], list[Entry]))
print("from rank 0:", collectives.gather(f"rank {rank}", str)[0])
folder, processes = agree_on_run(collectives, Path(f"runs/{rank}"), None)
print("folder:", folder, [process_id for _, process_id in processes].index(os.getpid()) == rank)
if rank == 1:
    with contextlib.suppress(pickle.UnpicklingError):  # rank 0's JSON
        dist.all_gather_object([None, None], Code(Path(sys.argv[1])), group=collectives._group)
else:
    try:
        collectives.gather(own, Entry)
    except ValueError as raised:
        print("refused:", raised)
dist.destroy_process_group()
end_process(0)
