"""Stack dumps on SIGUSR1, with the collectives of torch's flight recorder.

stacks/rank<k>.txt                 the stacks of all threads, dumps in order
stacks/rank<k>_collectives.json    the flight record at the last dump
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

from nsa.monitor.flight import write_flight_record
from nsa.monitor.observer import warn

_POLL_SECONDS = 0.25


def dump_stacks_on_signal(run_dir: Path, rank: int) -> None:
    """Dump the stacks of this process at each SIGUSR1.

    faulthandler writes the stacks in C, even while Python is blocked. A thread that polls the
    file's size adds the flight record.
    """
    path = run_dir / "stacks" / f"rank{rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
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
                    write_flight_record(path.with_name(f"rank{rank}_collectives.json"))
                    moment = datetime.now(timezone.utc).isoformat(timespec="seconds")
                    file.write(f"-- the dump above: process {os.getpid()}, {moment}\n\n".encode())
                except Exception as error:
                    warn(f"SIGUSR1: the flight record was not written: {error!r}")
                done = now = os.fstat(file.fileno()).st_size
            seen = now

    threading.Thread(target=add_flight_records, name="stacks", daemon=True).start()
