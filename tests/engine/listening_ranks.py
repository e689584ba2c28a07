"""On two ranks: join the process group and print, where the user set nothing, what follows.

The folder from which torch.compile loads libraries and the number of threads; then the addresses on
which the process listens.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import cache_dir

from nsa.engine.process_group import Ranks, start_ranks, stop_ranks

LISTEN = "0A"  # of /proc/net/tcp


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


if __name__ == "__main__":
    os.environ.pop("OMP_NUM_THREADS")
    start_ranks(Ranks.from_environment())
    dist.all_reduce(torch.ones(1))  # ranks connect to each other
    print(cache_dir(), torch.get_num_threads())
    print(*addresses(), sep="\n")
    stop_ranks()
