"""Collectives between the CPUs of all ranks, over gloo: errors, stop requests, small objects."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PEER_TIMEOUT = timedelta(minutes=30)  # on top of the slowest healthy rank


class AllRanksError(ValueError):
    """An error raised by all ranks at the same point, so that they can still save together."""


class RunAborted(Exception):
    """A No-Go, raised by all ranks together; the weights are intact."""


class CpuCollectives:
    """Collectives of a few bytes between CPUs; none waits for a GPU."""

    def __init__(self, slowest: float) -> None:
        """`slowest`: maximum seconds between two barriers on a healthy rank."""
        self._group = None
        if dist.get_world_size() > 1:
            timeout = PEER_TIMEOUT + timedelta(seconds=slowest)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def barrier(self, error: ValueError | None = None, stop: str | None = None) -> str | None:
        """Wait for all ranks; raise any rank's error on all, or return any rank's reason to stop.

        Otherwise the other ranks would wait for one that has exited.
        """
        return self.barrier_and_sum(0, error, stop)[0]

    def barrier_and_sum(
        self, number: int, error: ValueError | None = None, stop: str | None = None
    ) -> tuple[str | None, int]:
        """Return what `barrier` does, and the sum of all ranks' `number`, in one all-reduce."""
        if self._group is None:
            if error is not None:
                raise AllRanksError(str(error)) from error
            return stop, number
        sums = torch.tensor([error is not None, stop is not None, number])
        dist.all_reduce(sums, group=self._group)
        failed, stopped, total = sums.tolist()
        if not failed and not stopped:
            return None, total
        messages = self.gather((error and str(error), stop))
        errors = [message for message, _ in messages if message]
        if errors:
            raise AllRanksError("; ".join(dict.fromkeys(errors))) from error
        reasons = (f"{reason} on rank {r}" for r, (_, reason) in enumerate(messages) if reason)
        return next(reasons), total

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks, on every rank."""
        if self._group is None:
            return [value]
        values: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self._group)
        return values[0]
