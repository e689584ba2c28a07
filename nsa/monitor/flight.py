"""What torch's flight recorder knows of collectives: the one that is pending, or all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text

# The second is gloo's and every other backend's. Asking a recorder before a process group is made
# would settle its size for good.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


class Collectives:
    """Names the collective that this process waits for, at the cost of microseconds.

    The whole record takes tens of milliseconds, so that names are looked up only for a collective
    that two readings in a row found pending.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[str, int]] = []
        self._names: dict[tuple[str, int], str] = {}

    def read(self) -> str | None:
        """The pending collective, else the last one; None where nothing is known."""
        done: list[str] = []
        pending: list[tuple[str, int]] = []
        for record in _records(entries=False):
            for group, status in record.get("pg_status", {}).items():
                begun, ended = (
                    int(status[f"last_{what}_collective"]) for what in ("enqueued", "completed")
                )
                if begun > max(ended, 0):
                    pending.append((group, max(ended, 0) + 1))
                elif begun > 0:
                    done.append(f"#{begun} of group {group} done")
        if set(pending) & set(self._pending) - self._names.keys():
            self._names = _names()
        self._pending = pending
        if pending:
            return "; ".join(f"{self._name(key)} pending" for key in pending)
        return "; ".join(done) or None

    def _name(self, key: tuple[str, int]) -> str:
        return self._names.get(key, f"#{key[1]} of group {key[0]}")


def write_flight_record(path: Path) -> bool:
    """Write every collective that is on record to `path` as JSON; False where there is none."""
    records = _records(entries=True)
    if not any(record.get("entries") for record in records):
        return False
    atomic_write_text(path, json.dumps(records, indent=1) + "\n")
    return True


def _names() -> dict[tuple[str, int], str]:
    names: dict[tuple[str, int], str] = {}
    for record in _records(entries=True):
        for entry in record.get("entries", []):
            group, number = str(entry["pg_id"]), int(entry["collective_seq_id"])
            names[group, number] = (
                f"{entry['profiling_name']} #{number} of group {group} "
                f"({entry['process_group'][1]}, sizes {entry['input_sizes']})"
            )
    return names


def _records(entries: bool) -> list[dict[str, Any]]:
    """What each recorder of this process says; nothing before a process group is made."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]
    return [json.loads(dump(includeCollectives=entries)) for dump in dumps]
