"""What PyTorch's CPU allocator gave out and took back, as its own profiler records it.

What a thread of gloo's happens to free last is not recorded: what is in use is only right from a
span's start on, and what lies there before is counted from the live tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class Allocations:
    """Bytes that came into use within each span, and its collectives, while it watches."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}  # at most
        self.left: dict[str, int] = {}  # as the span ended
        self.collectives: dict[str, int] = {}  # started within the span
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @contextmanager
    def watching(self) -> Iterator[Allocations]:
        with self._profile:
            yield self
        events = self._profile.profiler.kineto_results.events()
        spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name()[:5] == "span "}
        started = [e.start_ns() for e in events if e.name().startswith("c10d::")]
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        for name, (start, end) in spans.items():
            used = most = 0
            for when, change in changes:
                if start <= when <= end:
                    used += change
                    most = max(most, used)
            self.most[name[5:]], self.left[name[5:]] = most, used
            self.collectives[name[5:]] = sum(start <= when <= end for when in started)

    @staticmethod
    def span(name: str) -> torch.profiler.record_function:
        return record_function(f"span {name}")


def live_bytes() -> int:
    """Of all tensors that Python knows, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
