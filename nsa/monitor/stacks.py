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
_Range = tuple[str, int, int]  # process group, first and last collective not known to have ended


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
                    records = _records(entries=True)
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


class CurrentCollective:
    """Names the collective that this process waits for.

    A summary takes microseconds, a full record with names tens of milliseconds: it is read only
    when a collective is pending in two summaries in a row. A summary may be wrong, as gloo's
    threads note the last completed collective in any order; the full record is right.
    """

    def __init__(self) -> None:
        self._pending: set[_Range] = set()
        self._names: dict[_Range, str] = {}  # from the full record; empty: all have ended

    def read(self) -> str | None:
        """Return the pending collective, else the last completed one; None if there is none."""
        done: list[str] = []
        pending: list[_Range] = []
        for record in _records(entries=False):
            for group, status in record.get("pg_status", {}).items():
                enqueued = int(status["last_enqueued_collective"])
                completed = max(int(status["last_completed_collective"]), 0)
                if enqueued > completed:
                    pending.append((group, completed + 1, enqueued))
                elif enqueued > 0:
                    done.append(f"#{enqueued} of group {group} done")
        if set(pending) & self._pending - self._names.keys():
            names = _unfinished()
            self._names = {
                at: next((name for (group, _), name in names.items() if group == at[0]), "")
                for at in pending
            }
        self._pending = set(pending)
        waiting: list[str] = []
        for group, first, last in pending:
            name = self._names.get((group, first, last), f"#{first} of group {group}")
            if name:
                waiting.append(f"{name} pending")
            else:
                done.append(f"#{last} of group {group} done")
        return "; ".join(waiting or done) or None


def _unfinished() -> dict[tuple[str, int], str]:
    """Return the names of collectives that were started and have not ended, by group, in order."""
    return {
        (str(entry["pg_id"]), int(entry["collective_seq_id"])): (
            f"{entry['profiling_name']} #{entry['collective_seq_id']} of group {entry['pg_id']} "
            f"({entry['process_group'][1]}, sizes {entry['input_sizes']})"
        )
        for record in _records(entries=True)
        for entry in record.get("entries", [])
        if not entry.get("retired") and entry.get("state") != "completed"
    }


def _records(entries: bool) -> list[dict[str, Any]]:
    """Return the content of each recorder; empty before a process group exists."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]
    return [json.loads(dump(includeCollectives=entries)) for dump in dumps]
