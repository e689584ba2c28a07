"""Sequence parallelism: several ranks split each sequence (Ulysses all-to-all around attention).

    outside attention   a rank has 1/S of the tokens and all of their heads
    inside attention    a rank has all tokens and 1/S of the heads

Inside attention, a KV head and its query heads see the full sequence, so compressed blocks,
windows, selection and documents are unaffected. The ranks' gradients sum to a single rank's.

deepspeed.sequence.layer.DistributedAttention exchanges queries, keys and values separately, and
supports neither gates nor per-branch keys. Here one all-to-all sends everything, and selective
checkpointing can save its output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.ops.inputs import PackedLayout


class SequenceParallel:
    """The ranks that split a sequence, in the order of its tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._group = group
        _groups[group.group_name] = group

    def tokens_to_heads(self, packed_BtP: Tensor, layout: PackedLayout) -> Tensor:
        """Exchange tokens for heads: turn a projection [B, T/S, P] into one [B, T, P/S].

        The result has the columns of `shard(layout)`, without padding.
        """
        by_rank = [  # each [S, B, T/S, columns of one rank's heads]
            part.unflatten(3, (self.size, -1)).movedim(3, 0).flatten(3)
            for part in layout.parts(packed_BtP)
        ]
        received = exchange(torch.cat(by_rank, 3), self._group.group_name)  # [S, B, T/S, P/S]
        return received.transpose(0, 1).flatten(1, 2)

    def shard(self, layout: PackedLayout) -> PackedLayout:
        """Return the layout of one rank's heads."""
        heads, kv_heads = layout.heads // self.size, layout.kv_heads // self.size
        return layout._replace(heads=heads, kv_heads=kv_heads)

    def heads_to_tokens(self, o_BTHD: Tensor) -> Tensor:
        """Exchange heads for tokens: turn [B, T, heads/S, D] into [B, T/S, heads, D]."""
        by_rank = o_BTHD.unflatten(1, (self.size, -1)).transpose(0, 1)  # [S, B, T/S, heads/S, D]
        return exchange(by_rank, self._group.group_name).movedim(0, 2).flatten(2, 3)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, without a gradient."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """Return the sum of all ranks' `total` (0-dim) divided by the sum of their `count`.

        The result is 0 if all counts are 0. Its gradient is multiplied by S: ZeRO averages
        gradients over all ranks, but a sequence's ranks must sum their gradients.
        """
        sums = self.sum(torch.stack((total, count.to(total.dtype))))
        divisor = sums[1].clamp(min=1)
        own = total * (self.size / divisor)
        return sums[0] / divisor + (own - own.detach())  # the gradient of `own`, not its value


_groups: dict[str, dist.ProcessGroup] = {}  # by name: custom ops take strings, not groups


@torch.library.custom_op("nsa::exchange", mutates_args=())
def exchange(x: Tensor, group: str) -> Tensor:
    """All-to-all: x[s] goes to rank s of the group; the result is indexed by the sending rank."""
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
