"""What all ranks must know of each other at every step, learnt without asking the device."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=30)  # beyond what a rank itself waits for


class AllRanksError(ValueError):
    """Raised by all ranks at the same place: collectives still work, so they may save."""


class Agreement:
    """Ranks meet on their processors: a collective of a few bytes that waits for no GPU."""

    def __init__(self, slowest: float) -> None:
        """`slowest`: seconds that a rank may take between two meetings and still be well."""
        self._group = None
        if dist.get_world_size() > 1:
            timeout = PATIENCE + timedelta(seconds=slowest)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def raise_together(self, error: ValueError | None) -> None:
        """Where one rank brings an error, all ranks raise it; so none waits for one that ended."""
        if self._group is None:
            if error is not None:
                raise AllRanksError(str(error)) from error
            return
        failed = torch.tensor(int(error is not None), dtype=torch.int32)
        dist.all_reduce(failed, group=self._group)
        if not failed:
            return
        messages: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, error and str(error), group=self._group)
        raise AllRanksError("; ".join(dict.fromkeys(filter(None, messages)))) from error
