"""Where a rank hangs: stack dumps on SIGUSR1, and collectives from torch's flight recorder.

stacks/rank<k>.txt                 the stacks of all threads, dumps in order
stacks/rank<k>_collectives.json    the flight record at the last dump
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text, no_symlink
from nsa.monitor.observer import warn

_POLL_SECONDS = 0.25
# NCCL's recorder, and that of the other backends. The first read fixes a recorder's size, so none
# is read before a process group exists.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def dump_stacks_on_signal(run_dir: Path, rank: int) -> None:
    """Dump the stacks of this process at each SIGUSR1.

    faulthandler writes the stacks in C, even while Python is blocked. A thread that polls the
    file's size adds the flight record.
    """
    path = run_dir / "stacks" / f"rank{rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab", 0, opener=no_symlink)  # noqa: SIM115 (used until the end)
    except OSError as error:
        warn(f"SIGUSR1 will write no stacks: {error!r}")
        return
    size = os.fstat(file.fileno()).st_size
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)

    def add_flight_records() -> None:
        seen = done = size
        while True:
            time.sleep(_POLL_SECONDS)
            now = os.fstat(file.fileno()).st_size
            if now == seen and now > done:  # the dump is complete
                try:
                    records = _records()
                    if any(record.get("entries") for record in records):
                        text = json.dumps(records, indent=1) + "\n"
                        atomic_write_text(path.with_name(f"rank{rank}_collectives.json"), text)
                    moment = datetime.now(timezone.utc).isoformat(timespec="seconds")
                    file.write(f"-- the dump above: process {os.getpid()}, {moment}\n\n".encode())
                except Exception as error:
                    warn(f"SIGUSR1: the flight record was not written: {error!r}")
                done = now = os.fstat(file.fileno()).st_size
            seen = now

    threading.Thread(target=add_flight_records, name="stacks", daemon=True).start()


def _records() -> list[dict[str, Any]]:
    """Return the content of each recorder; empty before a process group exists."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]
    return [json.loads(dump(includeCollectives=True)) for dump in dumps]
