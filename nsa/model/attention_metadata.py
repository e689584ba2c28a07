"""Attention metadata: positions, RoPE tables and the compressed-block grid, built once per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.model.config import ModelConfig
from nsa.model.rotary import Rotary
from nsa.model.selector_loss import ComparedQueries, sampled_queries
from nsa.model.sequence_parallel import SequenceParallel
from nsa.ops.documents import block_starts, repeat_per_document
from nsa.spec import NSASpec


@dataclass(frozen=True)
class AttentionMetadata:
    """Inputs of attention that all layers share; for full sequences, even if ranks split them."""

    cu_seqlens: Tensor | None
    rotary: Rotary  # RoPE at each token's position, which restarts with each document
    block_tokens: Tensor | None = None  # [N, l] token indices of each compressed block; dense: None
    token_blocks: Tensor | None = None  # [T, ⌈l/d⌉] the blocks that cover each token, else -1
    block_rotary: Rotary | None = None  # RoPE at each block's last position; dense: None
    sequence: SequenceParallel | None = None  # the ranks that split each sequence
    compared: ComparedQueries | None = None  # by the selector loss; None: there is no such loss

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

        `loss_offset`: where the queries of the selector loss begin; None: do not compute it.
        """
        spec, head_dim, theta = config.attention.spec, config.head_dim, config.rope_theta
        position = torch.arange(seq_len, device=device)
        if cu_seqlens is not None:
            position = position - repeat_per_document(cu_seqlens[:-1], cu_seqlens, seq_len)
        rotary = Rotary.at(position, head_dim, theta)
        if config.attention.kind == "dense":
            return cls(cu_seqlens, rotary, sequence=sequence)
        first = block_starts(seq_len, cu_seqlens, spec, device)  # [N]
        inside = torch.arange(spec.block_len, device=device)
        last = Rotary.at(position[first] + spec.block_len - 1, head_dim, theta)
        tables = first[:, None] + inside, _covering_blocks(first, spec, seq_len)
        compared = None
        if loss_offset is not None:
            queries = sampled_queries(seq_len, loss_offset)
            packed = cu_seqlens is not None
            compared = ComparedQueries.build(spec, queries, position, tables[0], packed)
        return cls(cu_seqlens, rotary, *tables, last, sequence, compared)


def _covering_blocks(first: Tensor, spec: NSASpec, seq_len: int) -> Tensor:
    """Return the blocks that cover each token, [T, ⌈l/d⌉], from their first tokens [N].

    A block that covers t begins after t - l and not after t. Blocks of other documents never do,
    because they end before t's document or begin after it.
    """
    token = torch.arange(seq_len, device=first.device)
    after = torch.searchsorted(first, token, right=True)
    block = torch.searchsorted(first, token - spec.block_len, right=True)[:, None]
    block = block + torch.arange(-(-spec.block_len // spec.block_stride), device=first.device)
    return torch.where(block < after[:, None], block, -1)
