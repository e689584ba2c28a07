"""FolderLock: only one run at a time may use a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from datetime import datetime, timezone
from pathlib import Path

NAME = ".lock"


class FolderLock:
    """A file lock that the process holds until it ends."""

    def __init__(self, run_dir: Path) -> None:
        """Create and lock the folder; raise ValueError if another run holds it."""
        self._run_dir = run_dir
        self._created = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / NAME).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            raise ValueError(
                f"{run_dir}: in use by another run{_describe_owner(self._file.read())}; wait until "
                "it ends, or choose another --run-dir"
            ) from None
        self._file.truncate(0)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = {"pid": os.getpid(), "host": os.uname().nodename, "since": now}
        self._file.write(json.dumps(owner) + "\n")
        self._file.flush()

    def abandon(self) -> None:
        """Release the folder and remove the folders that this lock created."""
        if self._created:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run uses a parent
            for parent in self._created[1:]:
                parent.rmdir()
        self._file.close()


def _describe_owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f" (process {owner['pid']} on {owner['host']}, since {owner['since']})"
    except (ValueError, KeyError, TypeError):
        return ""
