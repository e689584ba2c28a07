"""One sequence on several ranks, as DeepSpeed's Ulysses has it, around attention as it is.

    outside attention   a rank has 1/S of the tokens, and all heads of them
    inside              it has all tokens, and 1/S of the heads

A KV head and its query heads are one rank's, with the whole sequence: compressed blocks, windows,
selection and documents know nothing of where a rank's tokens end. Each rank computes the gradients
of what it did; their sum over the ranks is that of one rank with everything.

deepspeed.sequence.layer.DistributedAttention sends queries, keys and values one after the other,
and knows neither gates nor keys of branches. Here all go in one exchange, by an operation that
selective checkpointing can keep.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceParallel:
    """The ranks that share a sequence; `group`'s first rank has its first tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._group = group
        _groups[group.group_name] = group

    def to_heads(self, *parts_BtCHD: Tensor) -> list[Tensor]:
        """[B, T/S, copies, heads, D] each to [B, T, copies, heads/S, D], in one exchange."""
        mine = [part.unflatten(3, (self.size, -1)).movedim(3, 0) for part in parts_BtCHD]
        packed = exchange(torch.cat([part.flatten(3) for part in mine], 3), self._group.group_name)
        ends = [0]
        for part in mine:
            ends.append(ends[-1] + part[0, 0, 0].numel())
        gathered = packed.transpose(0, 1).flatten(1, 2)
        return [
            gathered[..., start:end].contiguous().unflatten(-1, part.shape[3:])
            for part, (start, end) in zip(mine, pairwise(ends), strict=True)
        ]

    def to_tokens(self, o_BTHD: Tensor) -> Tensor:
        """[B, T, heads/S, D] to [B, T/S, heads, D]."""
        theirs = o_BTHD.unflatten(1, (self.size, -1)).transpose(0, 1)
        return exchange(theirs, self._group.group_name).movedim(0, 2).flatten(2, 3)

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The sum of all ranks' `total`, 0-dim, over the sum of their `count`, or 0.

        Its gradient is S times that of this rank's `total`, because ZeRO takes the mean of all
        ranks' gradients where the ranks of a sequence would have to be summed.
        """
        return _Mean.apply(total, count, self._group, self.size)


_groups: dict[str, dist.ProcessGroup] = {}  # by name: an operation takes no group


@torch.library.custom_op("nsa::exchange", mutates_args=())
def exchange(x: Tensor, group: str) -> Tensor:
    """x[s] goes to rank s of the group; what comes back is by the rank that it came from."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=_groups[group])
    return received


@exchange.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange(gradient, ctx.group), None


exchange.register_autograd(_backward, setup_context=_setup_context)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, total: Tensor, count: Tensor, group: dist.ProcessGroup, size: int
    ) -> Tensor:
        sums = torch.stack((total, count.to(total.dtype)))
        dist.all_reduce(sums, group=group)
        divisor = sums[1].clamp(min=1)
        ctx.save_for_backward(size / divisor)
        return sums[0] / divisor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None, None, None
