"""Inputs and output shape of the block selection op, which two backends have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.spec import NSASpec


class Selection(NamedTuple):
    """Inputs of the op; `seq_len` is the document's length where q holds its last positions."""

    q: Tensor  # [B, T, Hq, Dk]
    k_cmp: Tensor  # [B, N, Hkv, Dk]
    lse: Tensor  # [B, T, Hq]
    cu_seqlens: Tensor | None
    spec: NSASpec
    seq_len: int
    scale: float

    def empty_index(self) -> Tensor:
        """The op's output without values: int32 [B, T, Hkv, n]."""
        shape = (*self.q.shape[:2], self.k_cmp.shape[2], self.spec.select_top)
        return self.q.new_empty(shape, dtype=torch.int32)
