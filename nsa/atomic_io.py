"""Atomic writes of files and folders: a reader finds all of one or nothing, even after a crash."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, with its parent folders."""
    atomic_write(path, text.encode("utf-8"))


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Write bytes to `path` atomically, with its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "wb", opener=no_symlink) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def no_symlink(path: str, flags: int) -> int:
    """Open a file, as open()'s `opener`; raise OSError for a symbolic link or an unread pipe.

    A link in a run's folder would let others append to or truncate a file of the run's owner; a
    pipe would block.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            reason = "is a symbolic link, whose target would be written; remove it"
            raise OSError(errno.ELOOP, reason, path) from None
        raise


def append_all_or_nothing(file: io.FileIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file, or nothing if the disk is full."""
    end = file.seek(0, os.SEEK_END)
    try:
        written = file.write(data)
        if written != len(data):
            raise OSError(f"{file.name}: only {written} of {len(data)} bytes were written")
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def append(path: Path, text: str, header: str = "") -> None:
    """Append all of `text` to a file, or nothing if the disk is full; begin the file with `header`.

    After a half-written line, the next line could not be read either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", 0, opener=no_symlink) as file:
        append_all_or_nothing(file, (text if file.tell() else header + text).encode())


def fsync_dir(folder: Path) -> None:
    """Flush the directory entries of `folder`: only then does a rename survive a power cut.

    Some network file systems cannot flush folders and return EINVAL.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def draft_folder(to: Path) -> Iterator[Path]:
    """Yield a new folder beside `to`; rename it to `to` at the end, delete it after an error."""
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in draft.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        publish(draft, to)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, to: Path) -> None:
    """Rename a folder to `to` after flushing its directory entries; its files must be flushed."""
    for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
        fsync_dir(folder)
    draft.rename(to)
    fsync_dir(to.parent)


def check_new_folder(to: Path) -> None:
    """Refuse a folder that is not empty; call it before slow imports, and again before writing."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"--to {to}: already exists; name a new folder")
