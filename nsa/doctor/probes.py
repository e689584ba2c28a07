"""Probes: read this machine's programs and files, with a time limit; empty on failure."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import psutil

_TIMEOUT_SECONDS = 10.0  # a stuck driver must not block the check


def output_of(*command: str) -> str:
    """Return a program's stdout, or "" if it is missing, fails or times out."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


def text_of(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def iommu_groups() -> int:
    """Return the number of IOMMU groups; 0 if the IOMMU is off."""
    return len(list(Path("/sys/kernel/iommu_groups").glob("*")))


def free_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def available_memory() -> int:
    """Return the available bytes of this machine, or its container's limit if that is lower."""
    available = psutil.virtual_memory().available
    limit = text_of("/sys/fs/cgroup/memory.max").strip()  # "max" without a limit
    return min(available, int(limit)) if limit.isdigit() else available


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
