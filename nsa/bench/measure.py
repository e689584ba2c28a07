"""Timing and peak memory of steps that alternate; medians over rounds.

Alternating spreads a slow minute of a shared machine over all steps. On a GPU the device's events
are the clock and the L2 cache is cold; on a CPU it is wall time. A failing step drops out alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

MIN_ROUNDS = 3
Step = Callable[[], object]


class DeviceLost(RuntimeError):
    """A step broke the CUDA context: nothing more can run in this process."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one step."""

    median: float
    low: float
    high: float
    rounds: int


def time_alternating(
    steps: Mapping[str, Step], device: torch.device, *, rounds: int, seconds: float = float("inf")
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time each step for up to `rounds` rounds or about `seconds`; return timings and errors.

    The first call warms up and compiles, the second decides how many rounds fit into `seconds`.
    """
    counts: dict[str, int] = {}
    errors: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    for name, step in steps.items():
        try:
            step()
            once = elapsed_ms(step, device) / 1e3
        except Exception as error:  # recorded as this step's result
            errors[name] = recover(error, device)
            continue
        counts[name] = int(min(rounds, max(MIN_ROUNDS, seconds / once)))
        times[name] = []
    for index in range(max(counts.values(), default=0)):
        for name in [name for name, count in counts.items() if index < count]:
            try:
                times[name].append(elapsed_ms(steps[name], device))
            except Exception as error:
                errors[name] = recover(error, device)
                del counts[name], times[name]
    timings = {
        name: Timing(statistics.median(ms), min(ms), max(ms), len(ms)) for name, ms in times.items()
    }
    return timings, errors


def median_seconds(
    steps: Mapping[str, Step], rounds: int, device: torch.device | None = None
) -> dict[str, float]:
    """Return each step's median wall time; raise if one fails. A GPU step must synchronize."""
    timings, errors = time_alternating(steps, device or torch.device("cpu"), rounds=rounds)
    if errors:
        raise RuntimeError("; ".join(errors.values()))
    return {name: timing.median / 1e3 for name, timing in timings.items()}


def elapsed_ms(step: Step, device: torch.device) -> float:
    """Milliseconds of one call, on a GPU with a cold L2 cache."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    flush = _flush_buffer(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end)


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


def peak_bytes(step: Step, held: Iterable[Tensor], device: torch.device) -> int | None:
    """Peak device memory of `step` as if it ran alone: its allocations plus the `held` tensors.

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
    """Bytes of the tensors' storages, each storage once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
