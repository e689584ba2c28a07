"""Why something could not be saved, and what to do about it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

ALMOST_NOTHING = (
    32 * 2**20
)  # bytes: with less free, a failed write was most likely for want of room
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_ACCESS = (errno.EROFS, errno.EACCES, errno.EPERM)


class SaveFailed(ValueError):
    """A checkpoint that was not saved: the file, the cause, the fix, and which one is still good.

    All ranks raise it together, and training can go on.
    """

    def __init__(self, step: int, text: str) -> None:
        super().__init__(text)
        self.step = step


def explain(error: BaseException, path: Path) -> str:
    """One line: the file that could not be written, the cause and the fix."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__  # torch's writer fails once more when it is closed
    number = getattr(error, "errno", None)
    cause = getattr(error, "strerror", None) or f"{type(error).__name__}: {_first_line(error)}"
    free = _free(path)
    unnamed = number is None and free is not None and free < ALMOST_NOTHING
    if number in NO_ROOM or unnamed:
        left = "" if free is None else f" ({free / 1e6:,.1f} MB are free)"
        fix = "; free some room, or keep fewer checkpoints with checkpoint.keep"
        return f"{path}: {cause}{left}{fix}"
    if number in NO_ACCESS:
        return f"{path}: {cause}; fix the folder's permissions or mount, or choose another"
    return f"{path}: {cause}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _free(path: Path) -> int | None:
    for folder in path.parents:
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None
