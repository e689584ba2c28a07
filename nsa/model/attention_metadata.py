"""Attention metadata: positions, RoPE tables and the compressed-block grid, built once per step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.model.config import ModelConfig
from nsa.ops.inputs import block_starts, repeat_per_document
from nsa.ops.rotary import rotate
from nsa.spec import NSASpec

# Queries of the selector loss in each sequence, at least; all queries of a shorter one. While only
# the index learns, its loss is the only gradient, and more queries teach it in fewer steps.
QUERIES, QUERIES_ALONE = 32, 256


class Rotary(NamedTuple):
    """Tables of cosines and sines, float32 [positions, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position: Tensor, config: ModelConfig) -> Rotary:
        frequency, factor = _frequencies(config, position.device)
        angle = position[:, None].float() * frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return cls(cos, sin) if factor == 1.0 else cls(cos * factor, sin * factor)

    def none(self) -> Rotary:
        """Return tables of the same shape that rotate by nothing."""
        return Rotary(torch.ones_like(self.cos), torch.zeros_like(self.sin))


def _frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return each pair's angle per position [head_dim / 2], and a factor of cosines and sines."""
    if config.rope_type == "default":
        exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
        return config.rope_theta ** (-exponent / config.head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # a second to import

    scaling = {"rope_theta": config.rope_theta, **(config.rope_extension or {})}
    like = SimpleNamespace(  # of a transformers config, what these functions read
        hidden_size=config.width,
        num_attention_heads=config.heads,
        head_dim=config.head_dim,
        rope_parameters=scaling,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[config.rope_type](like, device)


def apply_rotary(x_BTHD: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the two halves of each head as pairs, in at least float32."""
    return rotate(x_BTHD, *rotary).to(x_BTHD.dtype)


@dataclass(frozen=True)
class AttentionMetadata:
    """Inputs of attention that all layers share."""

    cu_seqlens: Tensor | None
    rotary: Rotary  # RoPE at each token's position, which restarts with each document
    block_tokens: Tensor | None = None  # [N, l] token indices of each compressed block; dense: None
    token_blocks: Tensor | None = None  # [T, ⌈l/d⌉] the blocks that cover each token, else -1
    block_rotary: Rotary | None = None  # RoPE at each block's last position; dense: None
    sampled: Tensor | None = None  # [S] tokens, queries of the selector loss; None: none

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        seq_len: int,
        cu_seqlens: Tensor | None,
        device: torch.device,
        loss_offset: Tensor | None = None,
        loss_queries: int = QUERIES,
    ) -> AttentionMetadata:
        """Build the metadata of a step; positions and blocks restart with each document.

        The selector loss has at least `loss_queries` queries, which `loss_offset` shifts; None: do
        not compute it.
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
            return cls(cu_seqlens, rotary)
        inside = torch.arange(spec.block_len, device=device)
        last = first + spec.block_len - 1
        block_rotary = Rotary(rotary.cos[last], rotary.sin[last])
        tables = first[:, None] + inside, _covering_blocks(first, spec, seq_len)
        sampled = None
        if loss_offset is not None:
            sampled = sample_queries(seq_len, loss_offset, loss_queries)
        return cls(cu_seqlens, rotary, *tables, block_rotary, sampled)

    def without_rope(self) -> AttentionMetadata:
        """Return the metadata of a layer that does not rotate."""
        block_rotary = None if self.block_rotary is None else self.block_rotary.none()
        return replace(self, rotary=self.rotary.none(), block_rotary=block_rotary)


def _covering_blocks(first: Tensor, spec: NSASpec, seq_len: int) -> Tensor:
    """Return the blocks that cover each token, [T, ⌈l/d⌉], from their first tokens [N].

    A block that covers t begins after t - l and not after t. A block of another document never
    does, because it ends before t's document or begins after it.
    """
    token = torch.arange(seq_len, device=first.device)
    after = torch.searchsorted(first, token, right=True)
    block = torch.searchsorted(first, token - spec.block_len, right=True)[:, None]
    block = block + torch.arange(-(-spec.block_len // spec.block_stride), device=first.device)
    return block.masked_fill_(block >= after[:, None], -1)


def sample_queries(seq_len: int, offset: Tensor, count: int = QUERIES) -> Tensor:
    """Return evenly spaced tokens [S], at least `count`; `offset`, a 0-dim integer, shifts them.

    A few queries are enough for the selector loss, other ones in each step: their noise averages
    out over steps.
    """
    stride = max(1, seq_len // count)
    return torch.arange(0, seq_len - stride + 1, stride, device=offset.device) + offset % stride
