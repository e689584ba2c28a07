"""SIGUSR1: where is every thread of this rank, and which collectives has it seen?

stacks/rank<k>.txt                 the stacks of all threads, one dump after the other
stacks/rank<k>_collectives.json    torch's flight record as of the last dump
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from nsa.monitor.flight import write_flight_record
from nsa.monitor.observer import warn

_LOOK_SECONDS = 0.25


def dump_stacks_on_signal(run_dir: Path, rank: int) -> Callable[[], None]:
    """From now on SIGUSR1 writes down where this process is; returns how to end that.

    The stacks are written by the signal's handler itself, in C, whatever holds Python up. The
    flight record follows from a thread, which sees the file grow.
    """
    path = run_dir / "stacks" / f"rank{rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    except OSError as error:
        warn(f"SIGUSR1 will write no stacks: {error!r}")
        return lambda: None
    ended = threading.Event()
    size = os.fstat(file.fileno()).st_size
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)

    def follow() -> None:
        seen = done = size
        while not ended.wait(_LOOK_SECONDS):
            now = os.fstat(file.fileno()).st_size
            if now == seen and now > done:  # the dump is whole
                try:
                    write_flight_record(path.with_name(f"rank{rank}_collectives.json"))
                    moment = datetime.now(timezone.utc).isoformat(timespec="seconds")
                    file.write(f"-- the dump above was made by process {os.getpid()} ".encode())
                    file.write(f"about {moment}\n\n".encode())
                except Exception as error:
                    warn(f"SIGUSR1: the flight record was not written: {error!r}")
                done = now = os.fstat(file.fileno()).st_size
            seen = now

    def end() -> None:
        faulthandler.unregister(signal.SIGUSR1)
        ended.set()
        thread.join()
        file.close()

    thread = threading.Thread(target=follow, name="stacks", daemon=True)
    thread.start()
    return end
