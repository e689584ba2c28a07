"""`env.json`: hardware, software and code of a run; `dtypes.txt`: what its first step used."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa.atomic_io import atomic_write_text
from nsa.monitor.observer import warn
from nsa.system import output_of, package_version
from nsa.text import align

_PACKAGES = ("torch", "deepspeed", "triton", "numpy", "transformers", "tensorboard", "nsa-m7c")
# Prefixes of the variables to record, unless their names match _SECRET.
_VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|URL|URI|DSN|PROXY")


def write_env(run_dir: Path, **facts: Any) -> dict[str, Any]:
    """Write `env.json`: the caller's `facts`, then facts about this process and machine."""
    env = facts | environment()
    atomic_write_text(run_dir / "env.json", json.dumps(env, indent=2) + "\n")
    return env


def environment() -> dict[str, Any]:
    """Return the hardware, software and code of this process."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "git_commit": git_commit(Path(__file__).resolve()),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        },
        "cuda": _cuda(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not _SECRET.search(name)
        },
    }


def git_commit(source: Path) -> str | None:
    """Return the commit of this code, "+changes" if edited; None without git or a checkout."""
    git = partial(output_of, "git", "-C", str(source.parent))
    # An installed copy, which git does not track, may lie in a checkout of something else.
    if not git("ls-files", "--error-unmatch", source.name):
        return None
    # Without tags, `describe` returns the commit.
    name = git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    return name.strip() or None


def cpu_model() -> str:
    from nsa.untrusted import text_or_empty  # late: benchmarks run where PyYAML is not installed

    match = re.search(r"^model name\s*: (.*)", text_or_empty("/proc/cpuinfo"), re.M)
    return match[1].strip() if match else (platform.processor() or platform.machine())


def _cuda() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    topology = re.sub(r"\x1b\[[0-9;]*m", "", output_of("nvidia-smi", "topo", "-m"))
    return {
        "version": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "devices": [device.name for device in devices],
        "memory_gb": [device.total_memory / 1e9 for device in devices],
        "topology": topology.strip().splitlines() or None,  # the links between GPUs
    }


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module; nvidia-smi would take much longer."""
    from nsa.untrusted import text_or_empty  # late, as in cpu_model

    match = re.search(r"\b\d+\.\d+(\.\d+)*\b", text_or_empty(file))
    return match[0] if match else None


def write_dtypes(path: Path, module: torch.nn.Module, optimizer: Any) -> None:
    """Write tables of the dtypes of parameters and of `optimizer`, torch's or DeepSpeed's.

    A gradient has the dtype of its parameter. The optimizer accumulates gradients in its own dtype.
    """
    try:
        atomic_write_text(path, _modules(module) + "\n" + _optimizer_states(optimizer))
    except Exception as error:
        warn(f"{path} was not written, the run continues: {error!r}")


def _modules(module: torch.nn.Module) -> str:
    """Return a table with a row per module; layers with equal rows share one, which counts them."""
    counts = Counter[tuple[str, str, str]]()
    for name, part in module.named_modules():
        if dtypes := _dtype_names(x.dtype for x in part.parameters(recurse=False)):
            pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)  # blocks.*.mlp
            counts[pattern, type(part).__name__, dtypes] += 1
    rows: list[tuple[str, ...]] = [("module", "kind", "parameters")]
    for (pattern, *cells), count in counts.items():
        rows.append((f"{pattern} ({count})" if count > 1 else pattern, *cells))
    return "\n".join(align(rows)) + "\n"


def _optimizer_states(optimizer: Any) -> str:
    """Return a table of the innermost optimizer's states and of DeepSpeed's accumulators."""
    dtypes: dict[str, list[torch.dtype]] = defaultdict(list)
    wrappers = [type(optimizer).__name__]
    while hasattr(optimizer, "optimizer"):
        for name in ("grad_acc_dtype", "gradient_accumulation_dtype"):  # DeepSpeed's
            if isinstance(dtype := getattr(optimizer, name, None), torch.dtype):
                dtypes["accumulated gradients"].append(dtype)
        optimizer = optimizer.optimizer
        wrappers.append(type(optimizer).__name__)
    for updated, state in optimizer.state.items():
        for name, value in {"updated parameters": updated, **state}.items():
            if isinstance(value, torch.Tensor):
                dtypes[name].append(value.dtype)
    rows = [("optimizer state", "dtype"), *((name, _dtype_names(x)) for name, x in dtypes.items())]
    return f"optimizer: {' > '.join(wrappers)}\n" + "\n".join(align(rows)) + "\n"


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return "+".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
