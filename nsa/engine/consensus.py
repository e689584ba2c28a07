"""What all ranks must know of each other at every step, learnt without asking the device."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # beyond what a rank itself waits for


class AllRanksError(ValueError):
    """Raised by all ranks at the same place: collectives still work, so they may save."""


class Consensus:
    """Ranks meet on their processors: a collective of a few bytes that waits for no GPU."""

    def __init__(self, slowest: float) -> None:
        """`slowest`: seconds that a rank may take between two meetings and still be well."""
        self._group = None
        if dist.get_world_size() > 1:
            timeout = PATIENCE + timedelta(seconds=slowest)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def meet(self, error: ValueError | None = None, stop: str | None = None) -> str | None:
        """Where one rank brings an error, all ranks raise it; so none waits for one that ended.

        Where one has been told to stop, all learn why: the first reason, with its rank.
        """
        if self._group is None:
            if error is not None:
                raise AllRanksError(str(error)) from error
            return stop
        brought = torch.tensor([error is not None, stop is not None], dtype=torch.int32)
        dist.all_reduce(brought, group=self._group)
        if not brought.any():
            return None
        said = self.gather((error and str(error), stop))
        errors = [message for message, _ in said if message]
        if errors:
            raise AllRanksError("; ".join(dict.fromkeys(errors))) from error
        return next(f"{why} on rank {rank}" for rank, (_, why) in enumerate(said) if why)

    def raise_together(self, error: ValueError | None) -> None:
        """`meet`, for those who only bring an error."""
        self.meet(error)

    def gather(self, thing: T) -> list[T]:
        """What each rank brings, in the order of the ranks; every rank must call it."""
        if self._group is None:
            return [thing]
        things: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(things, thing, group=self._group)
        return things  # type: ignore[return-value]

    def from_rank_0(self, thing: T) -> T:
        """Rank 0's `thing` on every rank."""
        if self._group is None:
            return thing
        things = [thing]
        dist.broadcast_object_list(things, group=self._group)
        return things[0]
