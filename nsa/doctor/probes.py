"""What programs and files of this machine tell; nothing where they do not answer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_SECONDS = 10.0  # a driver that is stuck must not take the check with it


def said_by(*words: str) -> str:
    """What a program prints; nothing where it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def iommu_groups() -> int:
    """How many groups of boards the kernel has put behind an IOMMU."""
    try:
        return len(os.listdir("/sys/kernel/iommu_groups"))
    except OSError:
        return 0


def text_of(path: Path) -> str:
    """A file's text."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def free_bytes(folder: Path) -> int | None:
    """Of the file system that a folder is on."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
