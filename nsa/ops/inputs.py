"""Inputs of attention and of block selection, as every backend receives them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.spec import NSASpec


class AttentionInputs(NamedTuple):
    """Inputs of one branch's attention; also the arguments of the blockwise custom op."""

    q: Tensor  # [B, T, Hq, Dk]
    k: Tensor  # [B, N, Hkv, Dk]
    v: Tensor  # [B, N, Hkv, Dv]
    block_index: Tensor | None  # int32 [B, T, Hkv, n]; only in the selected branch
    cu_seqlens: Tensor | None
    name: str  # compressed, selected or window
    spec: NSASpec
    scale: float


class SelectionInputs(NamedTuple):
    """Inputs of block selection; also the arguments of its custom ops."""

    q: Tensor  # [B, T, Hq, Dk]; the last T positions of the document
    k_cmp: Tensor  # [B, N, Hkv, Dk]
    lse: Tensor  # [B, T, Hq]
    cu_seqlens: Tensor | None
    spec: NSASpec
    seq_len: int  # the document's length, T or more
    scale: float

    def empty_index(self) -> Tensor:
        """Uninitialised output of the op: int32 [B, T, Hkv, n]."""
        shape = (*self.q.shape[:2], self.k_cmp.shape[2], self.spec.select_top)
        return self.q.new_empty(shape, dtype=torch.int32)
