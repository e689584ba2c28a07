"""`env.json`: hardware, software and code of a run."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.system import output_of, package_version, text_or_empty

_PACKAGES = ("torch", "deepspeed", "triton", "numpy", "transformers", "tensorboard", "nsa-m7c")
# Prefixes of the variables to record; not recorded are all others and those that match _SECRET.
_VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|URL|URI|DSN|PROXY")


def write_env(run_dir: Path, **facts: Any) -> dict[str, Any]:
    """Write `env.json`: the caller's `facts`, then those of this process and machine."""
    cores = os.cpu_count()
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    env = {
        **facts,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "git_commit": git_commit(Path(__file__).resolve()),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": {
            "model": cpu_model(),
            "cores": cores,
            "usable_cores": len(affinity(0)) if affinity else cores,
            "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        },
        "cuda": _cuda(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not _SECRET.search(name)
        },
    }
    atomic_write_text(run_dir / "env.json", json.dumps(env, indent=2) + "\n")
    return env


def git_commit(source: Path) -> str | None:
    """Return the commit of this code, "+changes" if edited; None without git or a checkout."""
    git = partial(output_of, "git", "-C", str(source.parent))
    # An installed copy may lie in a checkout.
    if not git("ls-files", "--error-unmatch", source.name):
        return None
    status = git("status", "--porcelain=v2", "--branch", "-uno").splitlines()
    head = re.match(r"# branch\.oid ([0-9a-f]+)$", status[0] if status else "")
    if head is None:
        return None
    return head[1] + ("+changes" if any(line[0] != "#" for line in status) else "")


def cpu_model() -> str:
    """Return the CPU's model name."""
    match = re.search(r"^model name\s*: (.*)", text_or_empty("/proc/cpuinfo"), re.M)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cuda() -> dict[str, Any] | None:
    import torch  # late: readers of a run's folder need none

    if not torch.cuda.is_available():
        return None
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    topology = re.sub(r"\x1b\[[0-9;]*m", "", output_of("nvidia-smi", "topo", "-m"))
    return {
        "version": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": driver_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "devices": [device.name for device in devices],
        "memory_gb": [device.total_memory / 1e9 for device in devices],
        "topology": topology.strip().splitlines() or None,  # the links between GPUs
    }


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module; much faster than nvidia-smi."""
    match = re.search(r"\b\d+\.\d+(\.\d+)*\b", text_or_empty(file))
    return match[0] if match else None
