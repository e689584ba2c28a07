"""What every layer of a step shares: positions, rotary tables, and where compressed blocks lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.model.sequence_parallel import SequenceParallel
from nsa.ops.documents import compressed_cu_seqlens
from nsa.spec import NSASpec


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of some positions, [positions, 1, head_dim / 2] in float32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position: Tensor, head_dim: int, theta: float) -> Rotary:
        exponent = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32)
        angle = position[:, None].float() * theta ** (-exponent / head_dim)
        return cls(angle.cos()[:, None], angle.sin()[:, None])

    def turn(self, x_BTHD: Tensor) -> Tensor:
        """Rotate the two halves of each head as pairs, in at least float32."""
        return _Turn.apply(x_BTHD, self.cos, self.sin)


class _Turn(torch.autograd.Function):
    """A rotation; its gradient is the rotation back.

    Four kernels each way, where autograd's own way through sines, cosines and halves takes nine
    forward and ten back: four times a layer, that is most of a small model's launches.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    pairs = x.unflatten(-1, (2, -1))
    turned = pairs * cos[..., None, :]
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-way)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sin, value=way)
    return turned.flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class Layout:
    """The geometry of one step's tokens, built once and read by every layer.

    It is that of whole sequences, also where a rank has a part of each.
    """

    cu_seqlens: Tensor | None
    rotary: Rotary  # of every token; positions restart with each document
    blocks: Tensor | None  # tokens of each compressed block, [N, l]; None for dense attention
    block_rotary: Rotary | None  # of each block's last position
    sequence: SequenceParallel | None = None  # the ranks that share each sequence

    @classmethod
    def of(
        cls,
        seq_len: int,
        cu_seqlens: Tensor | None,
        spec: NSASpec | None,
        head_dim: int,
        theta: float,
        device: torch.device,
        sequence: SequenceParallel | None = None,
    ) -> Layout:
        """`spec` is None where attention is dense."""
        position = torch.arange(seq_len, device=device)
        if cu_seqlens is not None:
            position = position - _for_each(cu_seqlens[:-1], cu_seqlens, seq_len)
        rotary = Rotary.at(position, head_dim, theta)
        if spec is None:
            return cls(cu_seqlens, rotary, None, None, sequence)
        if cu_seqlens is None:
            start = torch.arange(spec.compressed_len(seq_len), device=device) * spec.block_stride
            offset = start
        else:
            blocks = compressed_cu_seqlens(cu_seqlens, spec)
            count = int(blocks[-1])  # the one number that the host has to know
            number = torch.arange(count, device=device) - _for_each(blocks[:-1], blocks, count)
            start = number * spec.block_stride
            offset = start + _for_each(cu_seqlens[:-1], blocks, count)
        inside = torch.arange(spec.block_len, device=device)
        last = Rotary.at(start + spec.block_len - 1, head_dim, theta)
        return cls(cu_seqlens, rotary, offset[:, None] + inside, last, sequence)

    def to_heads(self, *parts_BtCHD: Tensor) -> Sequence[Tensor]:
        """What this rank attends with: all tokens of its heads; as it is on one rank."""
        return parts_BtCHD if self.sequence is None else self.sequence.to_heads(*parts_BtCHD)

    def to_tokens(self, o_BTHD: Tensor) -> Tensor:
        """The way back: all heads of this rank's tokens."""
        return o_BTHD if self.sequence is None else self.sequence.to_tokens(o_BTHD)


def _for_each(of_document: Tensor, offsets: Tensor, count: int) -> Tensor:
    """A number of each document, repeated for each of the `count` entries between its offsets."""
    return of_document.long().repeat_interleave(
        (offsets[1:] - offsets[:-1]).long(), output_size=count
    )
