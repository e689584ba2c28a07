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

# The selector loss reads at least this many queries of a sequence, or all of a shorter sequence.
QUERIES = 32
# While only the index learns, the selector loss is the only loss: more queries save steps.
QUERIES_ALONE = 256


class Rotary(NamedTuple):
    """Tables of cosines and sines, float32 [positions, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position: Tensor, config: ModelConfig) -> Rotary:
        frequency, factor = _frequencies(config, position.device)
        angle = position[:, None].float() * frequency  # [positions, head_dim / 2]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return cls(cos, sin) if factor == 1.0 else cls(cos * factor, sin * factor)

    def identity(self) -> Rotary:
        """Return tables of the same shape that rotate by 0."""
        return Rotary(torch.ones_like(self.cos), torch.zeros_like(self.sin))


def _frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return each pair's angle per position [head_dim / 2], and YaRN's factor for cos and sin."""
    if config.rope_type == "default":
        exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
        return config.rope_theta ** (-exponent / config.head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # a second to import

    hf_config = SimpleNamespace(  # the fields of a transformers config that these functions read
        hidden_size=config.width,
        num_attention_heads=config.heads,
        head_dim=config.head_dim,
        rope_parameters={"rope_theta": config.rope_theta, **(config.rope_extension or {})},
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[config.rope_type](hf_config, device)


def apply_rotary(x_BTHD: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the two halves of each head as pairs, in at least float32."""
    return rotate(x_BTHD, *rotary).to(x_BTHD.dtype)


@dataclass(frozen=True)
class AttentionMetadata:
    """Inputs of attention that all layers share."""

    cu_seqlens: Tensor | None
    rotary: Rotary  # RoPE at each token's position, which restarts with each document
    block_tokens: Tensor | None = None  # [N, l] token indices of each compressed block; dense: None
    token_blocks: Tensor | None = None  # [T, ⌈l/d⌉] the blocks that cover each token, padded by -1
    block_rotary: Rotary | None = None  # RoPE at each block's last position; dense: None
    sampled: Tensor | None = None  # [S] tokens whose queries the selector loss reads; None: no loss

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

        The selector loss reads at least `loss_queries` queries, which `loss_offset` shifts. Without
        `loss_offset` it is not computed.
        """
        spec = config.attention.spec
        dense = config.attention.kind == "dense"
        if not dense:  # before any use of cu_seqlens: it raises if they do not ascend
            first = block_starts(seq_len, cu_seqlens, spec, device)  # [N]
        position = torch.arange(seq_len, device=device)  # [T]
        if cu_seqlens is not None:
            position = position - repeat_per_document(cu_seqlens[:-1], cu_seqlens, seq_len)
        rotary = Rotary.at(position, config)
        if dense:
            return cls(cu_seqlens, rotary)
        block_tokens = first[:, None] + torch.arange(spec.block_len, device=device)  # [N, l]
        token_blocks = _covering_blocks(first, spec, seq_len)
        last = block_tokens[:, -1]
        block_rotary = Rotary(rotary.cos[last], rotary.sin[last])
        sampled = None
        if loss_offset is not None:
            sampled = sample_queries(seq_len, loss_offset, loss_queries)
        return cls(cu_seqlens, rotary, block_tokens, token_blocks, block_rotary, sampled)

    def without_rope(self) -> AttentionMetadata:
        """Return the metadata of a layer that does not rotate."""
        block_rotary = None if self.block_rotary is None else self.block_rotary.identity()
        return replace(self, rotary=self.rotary.identity(), block_rotary=block_rotary)


def _covering_blocks(first: Tensor, spec: NSASpec, seq_len: int) -> Tensor:
    """Return the blocks that cover each token, [T, ⌈l/d⌉], given the blocks' first tokens [N].

    A block covers t if its first token is from t - l + 1 to t. No block of another document is in
    this range, because it ends before t's document or begins after it.
    """
    token = torch.arange(seq_len, device=first.device)
    low = torch.searchsorted(first, token - spec.block_len, right=True)[:, None]  # [T, 1]
    end = torch.searchsorted(first, token, right=True)[:, None]
    block = low + torch.arange(-(-spec.block_len // spec.block_stride), device=first.device)
    return block.masked_fill_(block >= end, -1)


def sample_queries(seq_len: int, offset: Tensor, count: int = QUERIES) -> Tensor:
    """Return evenly spaced tokens [S], at least `count`; `offset`, a 0-dim integer, shifts them.

    A few tokens per step are enough for the selector loss: each step samples other tokens, so the
    noise averages out.
    """
    stride = max(1, seq_len // count)
    return torch.arange(0, seq_len - stride + 1, stride, device=offset.device) + offset % stride
