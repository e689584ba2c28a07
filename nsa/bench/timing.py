"""Timing and peak memory of steps that alternate; medians over rounds.

Alternating spreads a slow minute of a shared machine over all steps. A failing step does not end
the others. Clocks, by what limits a result:

    device   events around the step; the GPU spins first, until the host has queued the whole step
    host     events, but the host queued too slowly (or synchronized): its gaps are in the time
    wall     a CPU's time

Python may take longer to launch a small kernel than the GPU to run it: without the spin, small
cases would measure Python. The L2 cache is cold.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MIN_ROUNDS = 3
MAX_SPIN_MS = 50.0  # a step that takes longer to queue is longer than the gaps between its kernels
Step = Callable[[], object]


class DeviceLost(RuntimeError):
    """A failed step broke the CUDA context: this process can use the device no more."""


class Timing(NamedTuple):
    """Milliseconds of one step."""

    median: float
    low: float
    high: float
    rounds: int
    clock: str  # device, host or wall


class Sample(NamedTuple):
    """One timed call."""

    ms: float
    clock: str
    host_ms: float  # until the call returned: on a GPU, what it took to queue the work


def time_alternating(
    steps: Mapping[str, Step], device: torch.device, *, rounds: int, seconds: float = float("inf")
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time each step for up to `rounds` rounds or about `seconds`; return timings and errors.

    The first call warms up and compiles. The second decides how many rounds fit into `seconds`, and
    how long a GPU spins before each: twice the time that the host needed to queue the step.
    """
    counts: dict[str, int] = {}
    errors: dict[str, str] = {}
    spins: dict[str, float] = {}
    samples: dict[str, list[Sample]] = {}
    for name, step in steps.items():
        try:
            step()
            first = time_once(step, device)
        except Exception as error:  # recorded as this step's result
            errors[name] = recover(error, device)
            continue
        spins[name] = min(2 * first.host_ms, MAX_SPIN_MS) if device.type == "cuda" else 0.0
        counts[name] = int(min(rounds, max(MIN_ROUNDS, seconds * 1e3 / (first.ms + spins[name]))))
        samples[name] = []
    for index in range(max(counts.values(), default=0)):
        for name in [name for name, count in counts.items() if index < count]:
            try:
                samples[name].append(time_once(steps[name], device, spins[name]))
            except Exception as error:
                errors[name] = recover(error, device)
                del counts[name], samples[name]
    return {name: summarize(taken) for name, taken in samples.items()}, errors


def summarize(samples: Sequence[Sample]) -> Timing:
    """Return median, minimum, maximum and the most frequent clock; a tie is never `device`."""
    ms = [sample.ms for sample in samples]
    clocks = sorted((sample.clock for sample in samples), reverse=True)  # wall, host, device
    return Timing(statistics.median(ms), min(ms), max(ms), len(ms), statistics.mode(clocks))


def time_once(step: Step, device: torch.device, spin_ms: float = 0.0) -> Sample:
    """Time one call; a GPU starts it with a cold L2 cache, after spinning for `spin_ms`.

    If the device has reached the first event before the host has recorded the last one, it may
    have waited for the host in between: the sample's clock is then `host`.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        ms = (time.perf_counter() - start) * 1e3
        return Sample(ms, "wall", ms)
    flush, cycles = _flush_buffer(device), int(spin_ms * _cycles_per_ms(device))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    if cycles:
        torch.cuda._sleep(cycles)
    begin.record()
    start = time.perf_counter()
    step()
    end.record()
    host_ms = (time.perf_counter() - start) * 1e3
    clock = "host" if begin.query() else "device"
    torch.cuda.synchronize(device)
    return Sample(begin.elapsed_time(end), clock, host_ms)


@lru_cache(maxsize=1)
def _cycles_per_ms(device: torch.device) -> float:
    """Measure how fast torch.cuda._sleep counts; an idle GPU counts slower and so spins longer."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first call raises the clock
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        torch.cuda.synchronize(device)
    return 20_000_000 / begin.elapsed_time(end)


@lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> Tensor:
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(2 * cache, dtype=torch.int8, device=device)


def recover(error: Exception, device: torch.device) -> str:
    """Free what a failed step left allocated and return its error as one line."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    error.__traceback__ = None  # its frames hold the step's tensors
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as lost:
            raise DeviceLost(f"{reason}; the CUDA context is lost") from lost
    return reason


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(step: Step, held: Iterable[Tensor], device: torch.device) -> int | None:
    """Return the peak memory of `step` as if it ran alone: its allocations plus `held` tensors.

    None on a CPU, where PyTorch counts nothing.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + tensor_bytes(held)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
