"""Save errors: the file, the cause and the fix in one line."""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path

NEARLY_FULL = 32 * 2**20  # bytes; with less free, a write without errno most likely lacked space
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_ACCESS = (errno.EROFS, errno.EACCES, errno.EPERM)


class SaveFailed(ValueError):
    """A checkpoint that was not saved. All ranks raise it together, and training can continue."""

    def __init__(self, step: int, text: str) -> None:
        super().__init__(text)
        self.step = step


def describe_write_error(error: BaseException, path: Path) -> str:
    """Return the file that could not be written, the cause and the fix."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__  # torch's writer raises a second error when it is closed
    number = getattr(error, "errno", None)
    first_line = (str(error).strip().splitlines() or [""])[0]
    cause = getattr(error, "strerror", None) or f"{type(error).__name__}: {first_line}"
    free = _free_bytes(path)
    if number in NO_SPACE or (number is None and free is not None and free < NEARLY_FULL):
        left = "" if free is None else f" ({free / 1e6:,.1f} MB are free)"
        fix = "; free some space, or keep fewer checkpoints with checkpoint.keep"
        return f"{path}: {cause}{left}{fix}"
    if number in NO_ACCESS:
        return f"{path}: {cause}; fix the folder's permissions or mount, or choose another folder"
    return f"{path}: {cause}"


def _free_bytes(path: Path) -> int | None:
    for folder in path.parents:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return None
