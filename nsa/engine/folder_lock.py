"""One run in a folder at a time: two would overwrite each other's checkpoints."""

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
    """Held as long as the process lives, however that ends."""

    def __init__(self, run_dir: Path) -> None:
        """Take the folder, made where it is missing; a ValueError where another run has it."""
        self._run_dir = run_dir
        missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        self._made = missing[-1] if missing else None
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / NAME).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            raise ValueError(
                f"{run_dir} is in use by another run{_describe(self._file.read())}; wait for its "
                "end, or choose another --run-dir"
            ) from None
        self._file.truncate(0)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = {"pid": os.getpid(), "host": os.uname().nodename, "since": now}
        self._file.write(json.dumps(owner) + "\n")
        self._file.flush()

    def abandon(self) -> None:
        """Give the folder up as it was found: nothing of a refused run stays behind."""
        if self._made is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            parent = self._run_dir.parent
            while parent != self._made.parent:
                with contextlib.suppress(OSError):
                    parent.rmdir()
                parent = parent.parent
        self._file.close()


def _describe(text: str) -> str:
    try:
        owner = json.loads(text)
        return f" (process {owner['pid']} on {owner['host']}, since {owner['since']})"
    except (ValueError, KeyError, TypeError):
        return ""
