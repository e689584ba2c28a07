"""A rank's sign of life: what it is doing, written by a thread that lives when training hangs.

heartbeat_rank<k>.jsonl     a line for each step's start and end, and one every few seconds
heartbeat_rank<k>.1.jsonl   the older part, once the newer one has grown too long
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa.monitor.flight import Collectives
from nsa.monitor.observer import warn

PHASES = ("setup", "data", "forward", "backward", "step", "eval", "save", "idle")
EVENTS = ("start", "step_start", "progress", "step_end", "end")

_NUMBERS = ("time", "mono", "rank", "pid", "since", "step", "micro_step", "tokens", "skipped")
_FILE = re.compile(r"heartbeat_rank(\d+)(?:\.1)?\.jsonl")
_BATCH_SECONDS = 0.5  # how long the line of a step may wait to be written
_BACKLOG = 1_000  # lines that are kept while the disk takes none
_CLOSE_SECONDS = 5.0  # how long the end of a run waits for a disk
_TAIL = 64 * 1024  # bytes at a file's end that hold its last whole line


class Heartbeat:
    """Writes down where a rank is. Nothing here makes the training thread wait.

    `seconds` are between two progress lines; with 0 nothing is written at all. A disk that is full
    costs lines, not the run, and lines come back once there is room. A run that goes on has done
    `step` steps before.
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
        self._log = _Log(folder / f"heartbeat_rank{rank}.jsonl", limit)
        self._rank = rank
        self._who = {
            "rank": rank,
            "pid": os.getpid(),
            "host": platform.node(),
            "backend": backend,
        }
        self._seconds = seconds
        self._place = ("setup", time.monotonic(), 0)  # phase, since when, micro-step; set as one
        self._step, self._tokens, self._skipped = step, tokens, skipped
        self._loss: float | None = None
        self._device: int | None = None
        self._memory_gb = 0.0
        self._seen: tuple[str, float, int] | None = None  # the place at the last progress line
        self._collectives = Collectives()
        self._events: deque[dict[str, Any]] = deque(maxlen=_BACKLOG)
        self._status: str | None = None  # how the run has ended
        self._wake = threading.Event()  # something is to be written at once
        self._thread: threading.Thread | None = None
        if seconds > 0:
            self._tell("start")
            self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
            self._thread.start()

    def enter(self, phase: str, micro_step: int = 0) -> None:
        """From here on the rank is in `phase`, one of PHASES."""
        assert phase in PHASES, phase
        self._place = (phase, time.monotonic(), micro_step)

    def step_start(self, step: int) -> None:
        """Step number `step`, counted from 1, is about to be done."""
        self._step = step - 1
        if self._device is None:
            self._device = _current_device()  # only this thread knows which device it uses
        self._tell("step_start")

    def step_end(self, step: int, tokens: int, skipped: int) -> None:
        """`step` steps are done; all ranks have seen `tokens`, and `skipped` were not applied."""
        self._step, self._tokens, self._skipped = step, tokens, skipped
        self._tell("step_end")

    def logged(self, loss: float) -> None:
        """The loss that was logged last; null where it is no number, which JSON has no word for."""
        self._loss = loss if math.isfinite(loss) else None

    def write_soon(self) -> None:
        """Don't let the lines so far wait for others: somebody is about to read them."""
        self._wake.set()

    def close(self, status: str) -> None:
        """Write the last line; a disk that hangs is left behind after a few seconds."""
        if self._thread is not None and self._status is None:
            self._status = status
            self._wake.set()
            self._thread.join(_CLOSE_SECONDS)
            if self._log.lost:
                warn(f"{self._log.path.name}: {self._log.lost} lines lost in this run")

    def _tell(self, event: str, **more: Any) -> None:
        if self._seconds > 0:
            self._events.append(self._line(event, **more))

    def _line(self, event: str, **more: Any) -> dict[str, Any]:
        phase, since, micro_step = self._place
        now = time.monotonic()
        return {
            "time": round(time.time(), 3),
            "mono": round(now, 4),
            "event": event,
            **self._who,
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
            **more,
        }

    def _work(self) -> None:
        due = time.monotonic() + self._seconds
        pause = min(self._seconds, _BATCH_SECONDS)
        failed = False
        while True:
            self._wake.clear()
            status = self._status
            try:
                if status is not None:  # told here: nothing may follow it
                    self._tell("end", status=status)
                elif time.monotonic() >= due:
                    due = time.monotonic() + self._seconds
                    self._events.append(self._progress())
                self._log.write(self._events)
            except Exception as error:
                if not failed:
                    warn(f"heartbeat of rank {self._rank}: a line failed: {error!r}")
                failed = True
            if status is not None:
                return
            self._wake.wait(pause)

    def _progress(self) -> dict[str, Any]:
        """A line with what can be read from here, where nobody waits for it."""
        place = self._place
        if place is not self._seen:
            # A device that hangs may hold its allocator's lock: ask only while the rank moves.
            self._memory_gb = max(self._memory_gb, _memory_gb(self._device))
            self._seen = place
        return self._line(
            "progress", gpu_busy=_gpu_busy(self._device), collective=self._collectives.read()
        )


class _Log:
    """A file of lines that is appended to whole lines at a time, or not at all."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.lost = 0
        self._limit = limit
        self._file: io.FileIO | None = None
        self._backlog: deque[dict[str, Any]] = deque()
        self._warned = False

    def write(self, events: deque[dict[str, Any]]) -> None:
        """Take what is in `events` and append it; what the disk refuses is tried again later."""
        while events:
            self._backlog.append(events.popleft())
        while len(self._backlog) > _BACKLOG:
            self._backlog.popleft()
            self.lost += 1
        if not self._backlog:
            return
        try:
            self._append("".join(json.dumps(line) + "\n" for line in self._backlog).encode())
            self._backlog.clear()
        except FileNotFoundError:
            pass  # the run's folder is made once nothing can be refused any more
        except OSError as error:
            if not self._warned:
                warn(f"{self.path}: a write failed, the run goes on: {error!r}")
            self._warned = True

    def _append(self, data: bytes) -> None:
        if self._file is None or not self._is_in_place(self._file):
            self._file = io.FileIO(self.path, "ab+")
        end = self._file.seek(0, os.SEEK_END)
        if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            data = b"\n" + data  # a crash tore the last line
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes fitted")
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise
        if end + len(data) >= self._limit:
            os.replace(self.path, _older(self.path))
            # Open at all times: by its ranks' open files a run's folder is found from outside.
            self._file = io.FileIO(self.path, "ab+")

    def _is_in_place(self, file: io.FileIO) -> bool:
        """Whether the open file still is the one of that name; it may have been deleted."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False


def read_heartbeats(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """The lines of every rank, oldest first; those that are torn or corrupt are left out."""
    found = (_FILE.fullmatch(path.name) for path in run_dir.glob("heartbeat_rank*.jsonl"))
    ranks = sorted({int(match[1]) for match in found if match})
    return {rank: list(_whole(_lines(run_dir / f"heartbeat_rank{rank}.jsonl"))) for rank in ranks}


def _lines(path: Path) -> Iterator[bytes]:
    """Of both parts; read again where a rotation came between reading one and the other."""
    while True:
        older, data = _read(_older(path))
        parts = (data, _read(path)[1])
        if _read(_older(path), size=0)[0] == older:
            return (line for part in parts for line in part.splitlines())


def _read(path: Path, size: int = -1) -> tuple[int | None, bytes]:
    """A file's identity and content; None and nothing where there is none."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_ino, file.read(size)
    except FileNotFoundError:
        return None, b""


def last_beat(path: Path) -> dict[str, Any] | None:
    """The newest whole line of a heartbeat file; reads no more than its end."""
    for part in (path, _older(path)):
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            for beat in _whole(reversed(file.read().splitlines())):
                return beat
    return None


def _whole(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            beat = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(beat, dict)
            and beat.get("event") in EVENTS
            and beat.get("phase") in PHASES
            and all(isinstance(beat.get(name), (int, float)) for name in _NUMBERS)
        ):
            yield beat


def _older(path: Path) -> Path:
    return path.with_name(f"{path.stem}.1.jsonl")


def _cuda() -> Any | None:
    """`torch.cuda` where this process uses it; nothing is imported for a look."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _current_device() -> int | None:
    cuda = _cuda()
    return None if cuda is None else int(cuda.current_device())


def _memory_gb(device: int | None) -> float:
    """What the device's allocator held at its peak, or the process holds where it uses none."""
    cuda = _cuda()
    if cuda is not None:
        return 0.0 if device is None else cuda.max_memory_allocated(device) / 1e9
    import psutil  # late: who only reads heartbeats does without

    return psutil.Process().memory_info().rss / 1e9


def _gpu_busy(device: int | None) -> float | None:
    """The share of the last second in which the GPU computed; needs nvidia-ml-py."""
    cuda = _cuda()
    if cuda is None or device is None:
        return None
    try:
        return cuda.utilization(device) / 100
    except Exception:  # NVML has many, and its package may be missing
        return None
