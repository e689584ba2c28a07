"""Two ranks, of which the second has an error at the second step; each says what it saw."""

import torch.distributed as dist

from nsa.engine.consensus import Consensus

dist.init_process_group("gloo")
consensus = Consensus(slowest=60)
consensus.raise_together(None)
print("went on")
try:
    error = ValueError("rank 1 got no batch") if dist.get_rank() == 1 else None
    consensus.raise_together(error)
except ValueError as raised:
    print("raised:", raised)
consensus.raise_together(None)
print("still together")
dist.destroy_process_group()
