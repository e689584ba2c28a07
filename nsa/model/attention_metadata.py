"""Attention metadata: positions, RoPE tables and the compressed-block grid, built once per step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.model.config import ModelConfig
from nsa.model.rotary import Rotary
from nsa.model.sequence_parallel import SequenceParallel
from nsa.ops.documents import block_starts, repeat_per_document
from nsa.spec import NSASpec

QUERIES = 32  # of the selector loss in each sequence, at least; all queries of a shorter one


@dataclass(frozen=True)
class AttentionMetadata:
    """Inputs of attention that all layers share; of the full sequence, even if ranks split it."""

    cu_seqlens: Tensor | None
    rotary: Rotary  # RoPE at each token's position, which restarts with each document
    block_tokens: Tensor | None = None  # [N, l] token indices of each compressed block; dense: None
    token_blocks: Tensor | None = None  # [T, ⌈l/d⌉] the blocks that cover each token, else -1
    block_rotary: Rotary | None = None  # RoPE at each block's last position; dense: None
    sequence: SequenceParallel | None = None  # the ranks that split each sequence
    sampled: Tensor | None = None  # [S] tokens, queries of the selector loss; None: none

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        seq_len: int,
        cu_seqlens: Tensor | None,
        device: torch.device,
        sequence: SequenceParallel | None = None,
        loss_offset: Tensor | None = None,
    ) -> AttentionMetadata:
        """Build the metadata of a step; positions and blocks restart with each document.

        `loss_offset` shifts the queries of the selector loss; None: do not compute it.
        """
        spec = config.attention.spec
        dense = config.attention.kind == "dense"
        if not dense:  # before offsets that do not ascend reach a kernel
            first = block_starts(seq_len, cu_seqlens, spec, device)  # [N]
        position = torch.arange(seq_len, device=device)
        if cu_seqlens is not None:
            position = position - repeat_per_document(cu_seqlens[:-1], cu_seqlens, seq_len)
        rotary = Rotary.at(position, config)
        if dense:
            return cls(cu_seqlens, rotary, sequence=sequence)
        inside = torch.arange(spec.block_len, device=device)
        block_rotary = Rotary.at(position[first] + spec.block_len - 1, config)
        tables = first[:, None] + inside, _covering_blocks(first, spec, seq_len)
        sampled = None if loss_offset is None else sample_queries(seq_len, loss_offset)
        return cls(cu_seqlens, rotary, *tables, block_rotary, sequence, sampled)

    def without_rope(self) -> AttentionMetadata:
        """Return the metadata of a layer that does not rotate."""
        block_rotary = None if self.block_rotary is None else self.block_rotary.none()
        return replace(self, rotary=self.rotary.none(), block_rotary=block_rotary)


def _covering_blocks(first: Tensor, spec: NSASpec, seq_len: int) -> Tensor:
    """Return the blocks that cover each token, [T, ⌈l/d⌉], from their first tokens [N].

    A block that covers t begins after t - l and not after t. No block of another document does:
    it ends before t's document or begins after it.
    """
    token = torch.arange(seq_len, device=first.device)
    after = torch.searchsorted(first, token, right=True)
    block = torch.searchsorted(first, token - spec.block_len, right=True)[:, None]
    block = block + torch.arange(-(-spec.block_len // spec.block_stride), device=first.device)
    return torch.where(block < after[:, None], block, -1)


def sample_queries(seq_len: int, offset: Tensor, count: int = QUERIES) -> Tensor:
    """Return evenly spaced tokens [S], at least `count`; `offset`, a 0-dim integer, shifts them.

    A few queries are enough for the selector loss, other ones in each step: their noise averages
    out over steps.
    """
    stride = max(1, seq_len // count)
    return torch.arange(0, seq_len - stride + 1, stride, device=offset.device) + offset % stride
