"""Runs on two ranks; rank 1 passes an error to the second barrier. Each prints what it sees."""

import torch.distributed as dist

from nsa.engine.consensus import Consensus

dist.init_process_group("gloo")
consensus = Consensus(slowest=60)
consensus.barrier(None)
print("passed")
try:
    error = ValueError("rank 1 got no batch") if dist.get_rank() == 1 else None
    consensus.barrier(error)
except ValueError as raised:
    print("raised:", raised)
consensus.barrier(None)
print("passed again")
dist.destroy_process_group()
