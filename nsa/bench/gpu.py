"""Time and memory on a CUDA device, and what that device is; on a CPU the clock's time alone.

Contenders take turns, so that a slow minute hits all of them alike; each turn begins with a cold
L2 cache and is timed by the device's own events. Who fails drops out and leaves the rest running.
"""

from __future__ import annotations

import gc
import importlib.metadata
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FEWEST_TURNS = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Step = Callable[[], object]


class DeviceLost(RuntimeError):
    """The device answers nothing any more: what it did last broke its context."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one step over so many turns."""

    median: float
    low: float
    high: float
    turns: int


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def take_turns(
    steps: Mapping[str, Step], device: torch.device, *, seconds: float, rounds: int
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time each step for about so many seconds; returns the timings, and why others have none.

    A first call warms up and compiles, a second says how many turns fit into `seconds`.
    """
    turns: dict[str, int] = {}
    failed: dict[str, str] = {}
    taken: dict[str, list[float]] = {}
    for name, step in steps.items():
        try:
            step()
            once = elapsed_ms(step, device) / 1e3
        except Exception as error:  # whatever a contender ends with is its own result
            failed[name] = recover(error, device)
            continue
        turns[name] = min(rounds, max(FEWEST_TURNS, int(seconds / once)))
        taken[name] = []
    for turn in range(max(turns.values(), default=0)):
        for name in [name for name, count in turns.items() if turn < count]:
            try:
                taken[name].append(elapsed_ms(steps[name], device))
            except Exception as error:
                failed[name] = recover(error, device)
                del turns[name], taken[name]
    return {name: _timing(times) for name, times in taken.items()}, failed


def elapsed_ms(step: Step, device: torch.device) -> float:
    """Milliseconds of one call, with the GPU's L2 cache emptied before it."""
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
    """Twice the L2 cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(2 * cache, dtype=torch.int8, device=device)


def _timing(times: list[float]) -> Timing:
    return Timing(statistics.median(times), min(times), max(times), len(times))


def recover(error: Exception, device: torch.device) -> str:
    """Free what a failed step left behind, and say in a line what was wrong with it."""
    said = " ".join(str(error).split())[:400]
    reason = f"{type(error).__name__}: {said}"
    error.__traceback__ = None  # its frames hold the step's tensors
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as lost:
            raise DeviceLost(f"{reason}; the device is lost after it") from lost
    return reason


def peak_bytes(step: Step, owned: Iterable[Tensor], device: torch.device) -> int | None:
    """Device memory while `step` runs, as if alone: what it allocates and the tensors it owns.

    None on a CPU, where PyTorch counts nothing.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + tensor_bytes(owned)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """What these tensors take, each storage once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def hardware(device: torch.device) -> dict[str, Any]:
    """The device, its driver and clocks, and the versions of what computes on it."""
    facts: dict[str, Any] = {
        "device": device.type,
        "triton": _version("triton"),
        "flash_attn": _version("flash-attn"),
    }
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "name": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia_smi": _nvidia_smi(),
    }


def ceilings(device: torch.device, dtype: torch.dtype, *, size: int) -> dict[str, float]:
    """What a plain matrix product and a plain copy reach here: the roof over every kernel."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.empty(16 * size * size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    steps: dict[str, Step] = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    timings, _ = take_turns(steps, device, seconds=0.2, rounds=20)
    moved = 2 * source.numel() * source.element_size()
    return {
        "matrix_product_tflops": 2 * size**3 / timings["product"].median / 1e9,
        "copy_gbps": moved / timings["copy"].median / 1e6,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> dict[str, str] | None:
    """Only read: the card's settings stay as they are."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(fields.split(","), said.stdout.strip().split(", "), strict=False))
