"""Hardware, software versions and the command line of a benchmark run."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

import torch


def environment(arguments: Sequence[str], device: torch.device | None = None) -> dict[str, Any]:
    """What a result was measured on, when and by which command; with a device, its hardware."""
    facts = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m nsa.bench", *arguments]),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return facts if device is None else facts | {"hardware": _hardware(device)}


def pick_device(name: str) -> torch.device:
    """Return the device of `--device`; `auto` is the GPU if there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _hardware(device: torch.device) -> dict[str, Any]:
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


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _nvidia_smi() -> dict[str, str] | None:
    """Driver, clocks and limits, read only: the card's settings stay as they are."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(fields.split(","), done.stdout.strip().split(", "), strict=False))
