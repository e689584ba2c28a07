"""Two ranks go through the rank checks: first as they should be, then in four kinds of trouble.

Each prints a JSON object: the name of a situation, and the checks that it was given.
"""

import json
import threading
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from nsa.doctor.check import Check
from nsa.doctor.command import code_fingerprint, rank_checks

CPU = torch.device("cpu")
all_reduce = dist.all_reduce


def wrong_sum(buffer: torch.Tensor) -> None:
    """A link that spoils some of what one rank is sent."""
    all_reduce(buffer)
    if rank == 1:
        buffer[1_000:1_003] += 1


def hang(buffer: torch.Tensor) -> None:
    """A link over which nothing comes back."""
    threading.Event().wait()


def broken(buffer: torch.Tensor) -> None:
    """A library that gives up, on one rank; the other waits for it."""
    if rank == 1:
        raise RuntimeError("NCCL error: unhandled system error\nlast error: ...")
    hang(buffer)


dist.init_process_group("gloo")
rank = dist.get_rank()
other = rank == 1
code, config = code_fingerprint(), "train:\n  steps: 300\n  seed: 1\n"
found = {
    "well": rank_checks(
        fingerprint=code,
        config=config,
        device=CPU,
        machine=[] if other else [Check("disk", "warn", "nearly full", "free some")],
    ),
    "unlike": rank_checks(
        fingerprint="0123456789ab" if other else code,
        config=config.replace("300", "400") if other else config,
        device=CPU,
        megabytes=1,
        clock=lambda: time.time() + 5 * other,
    ),
}
for situation, link, patience in (
    ("wrong sum", wrong_sum, 60.0),
    ("hang", hang, 0.2),
    ("broken", broken, 60.0 if other else 0.2),
):
    dist.all_reduce = link
    found[situation] = rank_checks(fingerprint=code, device=CPU, megabytes=1, seconds=patience)
dist.all_reduce = all_reduce
print(json.dumps({name: [asdict(check) for check in checks] for name, checks in found.items()}))
dist.barrier()
dist.destroy_process_group()
