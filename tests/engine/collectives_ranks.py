"""Runs on two ranks; rank 1 stops, and passes an error. Each prints what it sees."""

import torch.distributed as dist

from nsa.engine.cpu_collectives import CpuCollectives

dist.init_process_group("gloo")
collectives = CpuCollectives(slowest=60)
collectives.barrier(None)
print("passed")
stop, total = collectives.barrier_and_sum(2**40 + dist.get_rank())
print("sum:", total - 2**41, stop)
stop, _ = collectives.barrier_and_sum(5, stop="SIGTERM" if dist.get_rank() else None)
print("stop:", stop)
try:
    error = ValueError("rank 1 got no batch") if dist.get_rank() == 1 else None
    collectives.barrier(error)
except ValueError as raised:
    print("raised:", raised)
collectives.barrier(None)
print("passed again")
dist.destroy_process_group()
