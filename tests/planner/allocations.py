"""Memory and collectives within named spans on the CPU.

`Allocations` is recorded by PyTorch's profiler. Frees by gloo's threads are not recorded, so usage
is relative to a span's start; what is in use before is counted from live tensors (`live_bytes`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class Allocations:
    """Bytes allocated since the start of each span, and its collectives."""

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self.held: dict[str, int] = {}  # at the end of the span
        self.collectives: dict[str, int] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @contextmanager
    def recording(self) -> Iterator[Allocations]:
        with self._profile:
            yield self
        events = self._profile.profiler.kineto_results.events()
        spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name()[:5] == "span "}
        started = [e.start_ns() for e in events if e.name().startswith("c10d::")]
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        for name, (start, end) in spans.items():
            used = peak = 0
            for when, change in changes:
                if start <= when <= end:
                    used += change
                    peak = max(peak, used)
            self.peak[name[5:]], self.held[name[5:]] = peak, used
            self.collectives[name[5:]] = sum(start <= when <= end for when in started)

    @staticmethod
    def span(name: str) -> torch.profiler.record_function:
        return record_function(f"span {name}")


def live_bytes() -> int:
    """Return the bytes of all tensors known to Python, each storage once."""
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
