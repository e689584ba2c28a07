"""Atomic file writes: a reader finds the old file or the new one, even after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, with its parent folders."""
    atomic_write(path, [text.encode("utf-8")])


def atomic_write(path: Path, chunks: Iterable[Any]) -> None:
    """Write bytes-like chunks to `path` atomically, with its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def fsync_dir(folder: Path) -> None:
    """Flush the directory entries of `folder`: only then does a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
