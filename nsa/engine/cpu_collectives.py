"""Collectives between the CPUs of all ranks, over gloo: errors, stop requests, small objects."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from nsa.data.worker import WorkerDied

T = TypeVar("T")
PEER_TIMEOUT = timedelta(minutes=30)  # in addition to what the slowest healthy rank takes


class AllRanksError(ValueError):
    """An error raised by all ranks at the same point, so that they can still save together."""


class AllRanksCrash(AllRanksError):
    """An AllRanksError that no setting causes: a restart may succeed."""


class RunAborted(Exception):
    """A No-Go, raised by all ranks together; the weights are intact."""


class CpuCollectives:
    """Collectives of a few bytes between CPUs; none waits for a GPU."""

    def __init__(self, max_seconds: float) -> None:
        """`max_seconds`: the longest time between two barriers on a healthy rank."""
        self._group = None
        if dist.get_world_size() > 1:
            timeout = PEER_TIMEOUT + timedelta(seconds=max_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def barrier(self, error: ValueError | None = None, stop: str | None = None) -> str | None:
        """Wait for all ranks; raise any rank's error on all, or return any rank's reason to stop.

        If only one rank raised or stopped, the others would wait for it.
        """
        return self.barrier_and_sum(0, error, stop)[0]

    def barrier_and_sum(
        self, number: int, error: ValueError | None = None, stop: str | None = None
    ) -> tuple[str | None, int]:
        """Return what `barrier` returns, and the sum of all ranks' `number`, in one all-reduce."""
        crashed = isinstance(error, WorkerDied)
        if self._group is None:
            if error is not None:
                raise (AllRanksCrash if crashed else AllRanksError)(str(error)) from error
            return stop, number
        sums = torch.tensor([error is not None, crashed, stop is not None, number])
        dist.all_reduce(sums, group=self._group)
        failed, crashes, stopped, total = sums.tolist()
        if not failed and not stopped:
            return None, total
        own = (None if error is None else str(error), stop)
        by_rank = self.gather(own, tuple[str | None, str | None])
        errors = [message for message, _ in by_rank if message]
        if errors:
            error_type = AllRanksCrash if crashes else AllRanksError
            raise error_type("; ".join(dict.fromkeys(errors))) from error
        reasons = (f"{reason} on rank {r}" for r, (_, reason) in enumerate(by_rank) if reason)
        return next(reasons), total

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return every rank's value, in the order of the ranks, on every rank.

        `kind` is the type of the values. They travel as JSON: a pickle would let a process that
        takes a rank's place run code.
        """
        if self._group is None:
            return [value]
        adapter = TypeAdapter(kind)
        text = json.dumps(adapter.dump_python(value, mode="json")).encode()
        size, ranks = torch.tensor([len(text)]), dist.get_world_size()
        sizes = [torch.zeros_like(size) for _ in range(ranks)]
        dist.all_gather(sizes, size, group=self._group)
        buffer = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        buffers = [torch.empty_like(buffer) for _ in range(ranks)]
        dist.all_gather(buffers, buffer, group=self._group)
        values = []
        for rank, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
            received = buffer.numpy().tobytes()
            try:
                values.append(adapter.validate_json(received[: int(size)]))
            except ValidationError:
                raise ValueError(
                    f"rank {rank} sent {received[:20]!r}… instead of {kind}: it is no rank of this "
                    "run, or runs other code; start the run again"
                ) from None
        return values

    def broadcast(self, value: T, kind: Any) -> T:
        """Return rank 0's value on every rank; the values of the others are ignored."""
        return self.gather(value, kind)[0]
