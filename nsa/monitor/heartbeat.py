"""Heartbeat: a rank's step and phase, written by a thread even while training hangs; stack dumps.

heartbeat_rank<k>.jsonl     a line at the start and end of each step, and one every few seconds
heartbeat_rank<k>.1.jsonl   older lines, moved here when the first file reaches its size limit
stacks/rank<k>.txt          the stacks of all threads at each SIGUSR1
stacks/rank<k>_collectives.json    torch's flight record at the last SIGUSR1
"""

from __future__ import annotations

import faulthandler
import io
import json
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nsa.atomic_io import append_all_or_nothing, atomic_write_text, no_symlink
from nsa.monitor.artifacts import PHASES, older_part
from nsa.monitor.memory import initialized_cuda, memory_gb
from nsa.monitor.observer import warn

_BATCH_SECONDS = 0.5  # longest delay between a line and its write
_BACKLOG = 1_000  # lines kept while the disk refuses writes
_POLL_SECONDS = 0.25  # between two checks for a new stack dump
# torch's functions that dump the flight records of NCCL and of the other backends. The first call
# fixes a recorder's size, so none is called before a process group exists.
_DUMP_FUNCTIONS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_Pending = tuple[str, int, int]  # process group, first and last collective not known to have ended


class Heartbeat:
    """Records the step and phase of a rank without delaying the training thread.

    `seconds` is the time between two progress lines. `step`, `tokens` and `skipped` come from the
    checkpoint that a resumed run loads. A full disk costs lines, not the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        backend: str,
        seconds: float,
        step: int = 0,
        tokens: int = 0,
        skipped: int = 0,
        limit: int = 16 * 2**20,
    ) -> None:
        self._file = _LineFile(folder / f"heartbeat_rank{rank}.jsonl", limit)
        self._constant = {
            "rank": rank,
            "pid": os.getpid(),
            "host": platform.node(),
            "backend": backend,
        }
        self._seconds = seconds
        # (phase, its start, micro-step): one tuple, so that the thread reads all three together.
        self._position = ("setup", time.monotonic(), 0)
        self._step, self._tokens, self._skipped = step, tokens, skipped
        self._loss: float | None = None
        self._device: int | None = None
        self._memory_gb = 0.0
        self._measured_at: tuple[str, float, int] | None = None  # position when memory was read
        self._collective = CurrentCollective()
        self._unwritten: list[dict[str, Any]] = []
        self._recorded = 0  # lines so far
        self._written = 0  # lines so far that were written or lost
        self._lost = 0
        self._lock = threading.Condition()  # of the lines and their counts; notified of each write
        self._status: str | None = None  # how the run ended
        self._wake = threading.Event()
        self._record("start")
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def enter(self, phase: str, micro_step: int = 0) -> None:
        """Set the phase, one of PHASES."""
        assert phase in PHASES, phase
        self._position = (phase, time.monotonic(), micro_step)

    def step_start(self, step: int) -> None:
        """Record the start of `step`, counted from 1."""
        self._step = step - 1
        if self._device is None and (cuda := initialized_cuda()) is not None:
            self._device = int(cuda.current_device())  # a property of this thread
        self._record("step_start")

    def step_end(self, step: int, tokens: int, skipped: int) -> None:
        """Record the end of `step`; `tokens` (of all ranks) and `skipped` count from the start."""
        self._step, self._tokens, self._skipped = step, tokens, skipped
        self._record("step_end")

    def set_loss(self, loss: float) -> None:
        """Set the loss of the last logged step; JSON has no NaN, so a non-finite loss is null."""
        self._loss = loss if math.isfinite(loss) else None

    def flush(self, timeout: float = 10.0) -> bool:
        """Write all recorded lines; return False if the disk refuses them for `timeout` seconds."""
        with self._lock:
            recorded = self._recorded
            self._wake.set()
            return self._lock.wait_for(lambda: self._written >= recorded, timeout)

    def close(self, status: str, timeout: float = 5.0) -> None:
        """Write the last line; wait at most `timeout` seconds for a disk that hangs."""
        if self._status is None:
            self._status = status
            self._wake.set()
            self._thread.join(timeout)
            if self._lost:
                warn(f"{self._file.path.name}: {self._lost} lines lost in this run")

    def _record(self, event: str, **values: Any) -> None:
        with self._lock:  # in the order of their times
            (phase, since, micro_step), now = self._position, time.monotonic()
            line = {
                "time": round(time.time(), 3),
                "mono": round(now, 4),
                "event": event,
                **self._constant,
                "phase": phase,
                "since": round(now - since, 4),
                "step": self._step,
                "micro_step": micro_step,
                "tokens": self._tokens,
                "loss": self._loss,
                "skipped": self._skipped,
                "memory_gb": round(self._memory_gb, 3),
                "gpu_busy": None,
                "collective": None,
                **values,
            }
            self._recorded += 1
            self._keep([*self._unwritten, line])

    def _keep(self, lines: list[dict[str, Any]]) -> None:
        """Keep the newest lines for the next write."""
        self._lost += max(0, len(lines) - _BACKLOG)
        self._unwritten = lines[-_BACKLOG:]

    def _work(self) -> None:
        due = time.monotonic() + self._seconds
        warned = False
        while True:
            self._wake.clear()
            status = self._status
            try:
                if status is not None:  # written by this thread, so that no line follows it
                    self._record("end", status=status)
                elif time.monotonic() >= due:
                    due = time.monotonic() + self._seconds
                    self._record_progress()
                self._write()
            except FileNotFoundError:
                pass  # the run's folder is created only after all checks have passed
            except Exception as error:
                if not warned:
                    path = self._file.path
                    warn(f"{path}: a write failed, the run continues: {error!r}")
                warned = True
            if status is not None:
                return
            self._wake.wait(min(self._seconds, _BATCH_SECONDS))

    def _write(self) -> None:
        """Write all recorded lines; keep those that the disk refuses for the next call."""
        with self._lock:
            lines, recorded = self._unwritten, self._recorded
            self._unwritten = []
        try:
            self._file.append("".join(json.dumps(line) + "\n" for line in lines).encode())
        except OSError:
            with self._lock:
                self._keep(lines + self._unwritten)
            raise
        with self._lock:
            self._written = recorded
            self._lock.notify_all()

    def _record_progress(self) -> None:
        """Record memory, GPU utilization and collectives, which this thread reads."""
        position = self._position
        if position is not self._measured_at:
            # A hung device may hold its allocator's lock: measure only if the rank has moved on.
            self._memory_gb = memory_gb(self._device)
            self._measured_at = position
        self._record(
            "progress", gpu_busy=_gpu_busy(self._device), collective=self._collective.read()
        )


class _LineFile:
    """A JSONL file that gets complete lines or nothing; a full file is moved aside."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._limit = limit
        self._file: io.FileIO | None = None

    def append(self, data: bytes) -> None:
        if not data:
            return
        if self._file is None or not self._is_current(self._file):
            self._file = io.FileIO(self.path, "ab+", opener=no_symlink)
        end = self._file.seek(0, os.SEEK_END)
        if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            data = b"\n" + data  # a crash tore the last line
        append_all_or_nothing(self._file, data)
        if end + len(data) >= self._limit:
            os.replace(self.path, older_part(self.path))
            # Always keep it open: the watchdog finds a run's folder by its ranks' open files.
            self._file = io.FileIO(self.path, "ab+", opener=no_symlink)

    def _is_current(self, file: io.FileIO) -> bool:
        """Return whether the open file is still at this path; it may have been deleted."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False


def _gpu_busy(device: int | None) -> float | None:
    """Return the GPU's utilization over the last second, 0 to 1; None without NVML or amdsmi."""
    cuda = initialized_cuda()
    if cuda is None or device is None:
        return None
    try:
        return cuda.utilization(device) / 100
    except Exception:  # NVML has many, and its package may be missing
        return None


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
    old_size = os.fstat(file.fileno()).st_size
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)

    def add_flight_records() -> None:
        previous_size = done_size = old_size
        while True:
            time.sleep(_POLL_SECONDS)
            size = os.fstat(file.fileno()).st_size
            if size == previous_size and size > done_size:  # the dump is complete
                try:
                    records = _records(True)
                    if any(record.get("entries") for record in records):
                        text = json.dumps(records, indent=1) + "\n"
                        atomic_write_text(path.with_name(f"rank{rank}_collectives.json"), text)
                    time_utc = datetime.now(timezone.utc).isoformat(timespec="seconds")
                    line = f"-- the dump above: process {os.getpid()}, {time_utc}\n\n"
                    file.write(line.encode())
                except Exception as error:
                    warn(f"SIGUSR1: the flight record was not written: {error!r}")
                size = done_size = os.fstat(file.fileno()).st_size
            previous_size = size

    threading.Thread(target=add_flight_records, name="stacks", daemon=True).start()


class CurrentCollective:
    """Names the collective that this process waits for, from torch's flight record.

    Reading a summary takes microseconds, reading a full record, with names, tens of milliseconds.
    So the full record is read only if the same collectives are pending in two summaries in a row.
    A summary may be wrong, because gloo's threads note the last completed collective in any order;
    the full record is right.
    """

    def __init__(self, records: Callable[[bool], list[dict[str, Any]]] | None = None) -> None:
        self._records = records or _records
        self._pending: set[_Pending] = set()  # in the last summary

    def read(self) -> str | None:
        """Return the pending collective, else the last completed one; None if there is none."""
        done: list[str] = []
        pending: list[_Pending] = []
        for record in self._records(False):
            for group, status in record.get("pg_status", {}).items():
                enqueued = int(status["last_enqueued_collective"])
                completed = max(int(status["last_completed_collective"]), 0)
                if enqueued > completed:
                    pending.append((group, completed + 1, enqueued))
                elif enqueued > 0:
                    done.append(f"#{enqueued} of group {group} done")
        earlier, self._pending = self._pending, set(pending)
        names = self._unfinished() if earlier & self._pending else {}  # by group
        waiting: list[str] = []
        for group, first, last in pending:
            if (group, first, last) not in earlier:
                waiting.append(f"#{first} of group {group} pending")
            elif group in names:
                waiting.append(f"{names[group]} pending")
            else:
                done.append(f"#{last} of group {group} done")
        return "; ".join(waiting or done) or None

    def _unfinished(self) -> dict[str, str]:
        """Return the name of each group's first collective that was started and has not ended."""
        names: dict[str, str] = {}
        for record in self._records(True):
            for entry in record.get("entries", []):
                group, number = str(entry["pg_id"]), entry["collective_seq_id"]
                if not entry.get("retired") and entry.get("state") != "completed":
                    names.setdefault(
                        group,
                        f"{entry['profiling_name']} #{number} of group {group} "
                        f"({entry['process_group'][1]}, sizes {entry['input_sizes']})",
                    )
        return names


def _records(entries: bool) -> list[dict[str, Any]]:
    """Return the flight record of each backend, as a summary or with `entries`.

    Without a process group there is none.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name) for name in _DUMP_FUNCTIONS if hasattr(c10d, name)]
    return [json.loads(dump(includeCollectives=entries)) for dump in dumps]
