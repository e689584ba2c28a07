"""Worker of test_ranks.py: two ranks run the rank checks, healthy and with four faults.

Each prints a JSON object: fault → checks.
"""

import json
import threading
from dataclasses import asdict

import torch
import torch.distributed as dist

from nsa.doctor import ranks
from nsa.doctor.node import Check
from nsa.doctor.ranks import rank_checks
from nsa.engine.process_group import CpuCollectives, stop_ranks

CPU = torch.device("cpu")
all_reduce = dist.all_reduce


def wrong_sum(buffer: torch.Tensor) -> None:
    """A link that corrupts some of what rank 1 receives."""
    all_reduce(buffer)
    if rank == 1:
        buffer[1_000:1_003] += 1


def hang(buffer: torch.Tensor) -> None:
    """A link without an answer."""
    threading.Event().wait()


def broken(buffer: torch.Tensor) -> None:
    """An error on one rank, while the other waits."""
    if rank == 1:
        raise RuntimeError("NCCL error: unhandled system error\nlast error: ...")
    hang(buffer)


dist.init_process_group("gloo")
rank = dist.get_rank()
gather = CpuCollectives(max_seconds=60).gather
other = rank == 1
config = "train:\n  steps: 300\n  seed: 1\n"
results = {
    "healthy": rank_checks(
        gather=gather,
        config=config,
        device=CPU,
        node_checks=[Check("disk", "warn", "nearly full", "free some")] if other else [],
    ),
}
if other:
    ranks.code_fingerprint = lambda: "0123456789ab"
results["different"] = rank_checks(
    gather=gather,
    config=config.replace("300", "400") if other else config,
    device=CPU,
)
for fault, link, limit in (
    ("wrong sum", wrong_sum, 60.0),
    ("hang", hang, 0.2),
    ("broken", broken, 60.0 if other else 0.2),
):
    dist.all_reduce, ranks.LIMIT_SECONDS = link, limit
    results[fault] = rank_checks(gather=gather, device=CPU)
dist.all_reduce = all_reduce
print(json.dumps({name: [asdict(check) for check in checks] for name, checks in results.items()}))
stop_ranks()
