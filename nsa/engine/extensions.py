"""Where DeepSpeed builds its small C++ ops, so that every start of this environment finds them.

A build is redone whenever the compile command differs, and waits for a lock that an interrupted
build leaves behind. So each virtual environment builds in its own folder with its own ninja, and a
lock that nobody can still hold is removed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STALE_SECONDS = 600  # no build of these ops takes that long


def prepare_extensions() -> None:
    """Fix the build folder and ninja of this process, unless the user chose a folder."""
    here = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", "").split(os.pathsep)
    if paths[:1] != [here]:
        os.environ["PATH"] = os.pathsep.join([here, *paths])
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder is None:
        return
    for lock in Path(folder).glob("**/lock"):
        try:
            if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                lock.unlink()
        except FileNotFoundError:
            pass  # its build has just ended


def build_extensions() -> None:
    """Build what the CPU's process groups need, once, before two ranks ask for it together."""
    prepare_extensions()
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        ShareMemCommBuilder().load(verbose=False)


if __name__ == "__main__":
    build_extensions()
