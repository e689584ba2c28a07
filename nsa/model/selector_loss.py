"""Queries of the selector loss: a sample of each sequence's tokens, other ones in each step.

A few are enough: their noise averages out over steps. `nsa.ops.selector` computes the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERIES = 32  # sampled from each sequence, at least; all queries of a shorter one


def sample_queries(seq_len: int, offset: Tensor, count: int = QUERIES) -> Tensor:
    """Return evenly spaced tokens [S], at least `count`; `offset`, a 0-dim integer, shifts them."""
    stride = max(1, seq_len // count)
    return torch.arange(0, seq_len - stride + 1, stride, device=offset.device) + offset % stride
