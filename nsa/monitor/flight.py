"""Collectives from torch's flight recorder: the pending one by name, or all of them as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text

# NCCL's recorder, and that of the other backends. The first read fixes a recorder's size, so none
# is read before a process group exists.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_Key = tuple[str, int]  # process group, number of the collective


class Collectives:
    """Names the collective that this process waits for.

    A summary takes microseconds, a full record with names tens of milliseconds: names are read only
    for a collective that is pending in two summaries in a row.
    """

    def __init__(self) -> None:
        self._pending: list[_Key] = []
        self._names: dict[_Key, str] = {}

    def read(self) -> str | None:
        """Return the pending collective, else the last completed one; None if there is none."""
        done: list[str] = []
        pending: list[_Key] = []
        for record in _records(entries=False):
            for group, status in record.get("pg_status", {}).items():
                enqueued = int(status["last_enqueued_collective"])
                completed = int(status["last_completed_collective"])
                if enqueued > max(completed, 0):
                    pending.append((group, max(completed, 0) + 1))
                elif enqueued > 0:
                    done.append(f"#{enqueued} of group {group} done")
        if set(pending) & set(self._pending) - self._names.keys():
            self._names = _names()
        self._pending = pending
        if pending:
            return "; ".join(
                f"{self._names.get(key, f'#{key[1]} of group {key[0]}')} pending" for key in pending
            )
        return "; ".join(done) or None


def write_flight_record(path: Path) -> bool:
    """Write all recorded collectives to `path` as JSON; return False if there are none."""
    records = _records(entries=True)
    if not any(record.get("entries") for record in records):
        return False
    atomic_write_text(path, json.dumps(records, indent=1) + "\n")
    return True


def _names() -> dict[_Key, str]:
    return {
        (str(entry["pg_id"]), int(entry["collective_seq_id"])): (
            f"{entry['profiling_name']} #{entry['collective_seq_id']} of group {entry['pg_id']} "
            f"({entry['process_group'][1]}, sizes {entry['input_sizes']})"
        )
        for record in _records(entries=True)
        for entry in record.get("entries", [])
    }


def _records(entries: bool) -> list[dict[str, Any]]:
    """Return the content of each recorder; empty before a process group exists."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]
    return [json.loads(dump(includeCollectives=entries)) for dump in dumps]
