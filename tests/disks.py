"""Real file systems for tests, which may be shrunk, remounted or frozen; damaged files.

Mounting needs root.
"""

import fcntl
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount a file system at a new folder, or skip the test where that is not allowed."""
    folder.mkdir()
    result = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"no file system can be mounted here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def freezable_disk(folder: Path, megabytes: int = 64) -> Iterator[Path]:
    """Mount an ext4 file system that `frozen` accepts."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no file system can be made here: mkfs.ext4 is not installed")
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(megabytes * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(folder, "-o", "loop", str(image)):
        yield folder


@contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Freeze a file system, as `fsfreeze` does: any writer waits, and cannot be killed."""
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, FIFREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(descriptor, FITHAW, 0)
    finally:
        os.close(descriptor)


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """Simulate a full disk: no file of this process grows past `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def set_fields(path: Path, **fields: Any) -> None:
    """Set fields of the object in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def truncate(path: Path) -> None:
    """Cut off the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
