"""Runs on two ranks; rank 1 stops, and passes an error. Each prints what it sees."""

import torch.distributed as dist

from nsa.engine.consensus import Consensus

dist.init_process_group("gloo")
consensus = Consensus(slowest=60)
consensus.barrier(None)
print("passed")
stop, total = consensus.barrier_and_sum(2**40 + dist.get_rank())
print("sum:", total - 2**41, stop)
stop, _ = consensus.barrier_and_sum(5, stop="SIGTERM" if dist.get_rank() else None)
print("stop:", stop)
try:
    error = ValueError("rank 1 got no batch") if dist.get_rank() == 1 else None
    consensus.barrier(error)
except ValueError as raised:
    print("raised:", raised)
consensus.barrier(None)
print("passed again")
dist.destroy_process_group()
