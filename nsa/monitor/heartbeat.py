"""Heartbeat: a rank's step and phase, written by a thread even while training hangs; stack dumps.

heartbeat_rank<k>.jsonl     a line at the start and end of each step, and one every few seconds
stacks/rank<k>.txt          the stacks of all threads at each SIGUSR1
"""

from __future__ import annotations

import faulthandler
import io
import json
import math
import os
import platform
import signal
import threading
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from nsa.atomic_io import append_all_or_nothing, no_symlink
from nsa.monitor.artifacts import PHASES
from nsa.monitor.memory import initialized_cuda, memory_gb
from nsa.monitor.observer import BackgroundWriter, warn

_BACKLOG = 2**20  # bytes of lines that are kept while the disk refuses writes


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
    ) -> None:
        self._path = folder / f"heartbeat_rank{rank}.jsonl"
        # Kept open: the watchdog finds a run's folder by its ranks' open files.
        self._file: io.FileIO | None = None
        self._rank, self._backend, self._seconds = rank, backend, seconds
        # (phase, its start, micro-step): one tuple, so that the thread reads all three together.
        self._position = ("setup", time.monotonic(), 0)
        self._step, self._tokens, self._skipped = step, tokens, skipped
        self._loss: float | None = None
        self._device: int | None = None
        self._memory_gb = 0.0
        self._measured_at: tuple[str, float, int] | None = None  # position when memory was read
        self._unwritten = b""  # lines that the disk refused
        self._lock = threading.Lock()  # lines are queued in the order of their times
        self._ended = threading.Event()
        self._writer = BackgroundWriter(self._path.name)
        self._record("start")
        threading.Thread(target=self._record_progress, name="heartbeat", daemon=True).start()

    def enter(self, phase: str, micro_step: int = 0) -> None:
        assert phase in PHASES, phase
        self._position = (phase, time.monotonic(), micro_step)

    def step_start(self, step: int) -> None:
        """Record the start of `step`, counted from 1."""
        self._step = step - 1
        if self._device is None and (cuda := initialized_cuda()) is not None:
            self._device = int(cuda.current_device())  # differs by thread
        self._record("step_start")

    def step_end(self, step: int, tokens: int, skipped: int) -> None:
        """Record the end of `step`; `tokens` (of all ranks) and `skipped` count from the start."""
        self._step, self._tokens, self._skipped = step, tokens, skipped
        self._record("step_end")

    def set_loss(self, loss: float) -> None:
        """Set the loss of the last logged step; JSON has no NaN, so a non-finite loss is null."""
        self._loss = loss if math.isfinite(loss) else None

    def flush(self, timeout: float = 10.0) -> bool:
        """Write all lines; return False if the disk refuses them or takes longer than `timeout`."""
        self._writer.submit(partial(self._write, ""))  # retries refused lines
        return self._writer.flush(timeout) and not self._unwritten

    def close(self, status: str) -> None:
        """Write the last line; wait at most 5 seconds for a disk that hangs."""
        self._record("end", status=status)
        self._writer.close(timeout=5.0)

    def _record(self, event: str, **values: Any) -> None:
        with self._lock:
            if self._ended.is_set():  # no line follows the last one
                return
            (phase, since, micro_step), now = self._position, time.monotonic()
            line = {
                "time": round(time.time(), 3),
                "mono": round(now, 4),
                "event": event,
                "rank": self._rank,
                "pid": os.getpid(),
                "host": platform.node(),
                "backend": self._backend,
                "phase": phase,
                "since": round(now - since, 4),
                "step": self._step,
                "micro_step": micro_step,
                "tokens": self._tokens,
                "loss": self._loss,
                "skipped": self._skipped,
                "memory_gb": round(self._memory_gb, 3),
                "gpu_busy": None,
                **values,
            }
            self._writer.submit(partial(self._write, json.dumps(line) + "\n"))
            if event == "end":
                self._ended.set()

    def _record_progress(self) -> None:
        """Record memory and GPU utilization, which this thread reads, every few seconds."""
        while not self._ended.wait(self._seconds):
            position = self._position
            if position is not self._measured_at:
                # A hung device may hold its allocator's lock: measure only if the rank moved on.
                self._memory_gb = memory_gb(self._device)
                self._measured_at = position
            self._record("progress", gpu_busy=_gpu_busy(self._device))

    def _write(self, line: str) -> None:
        """Write a line after those that the disk refused; keep them if it refuses again."""
        self._unwritten = self._unwritten[-_BACKLOG:] + line.encode()
        if self._file is None:
            self._file = io.FileIO(self._path, "ab+", opener=no_symlink)
            end = self._file.seek(0, os.SEEK_END)
            if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
                self._unwritten = b"\n" + self._unwritten  # a crash tore the last line
        append_all_or_nothing(self._file, self._unwritten)
        self._unwritten = b""


def _gpu_busy(device: int | None) -> float | None:
    """Return the GPU's utilization over the last second, 0 to 1; None without NVML or amdsmi."""
    cuda = initialized_cuda()
    if cuda is None or device is None:
        return None
    try:
        return cuda.utilization(device) / 100
    except Exception:  # NVML raises many kinds, or is missing
        return None


def dump_stacks_on_signal(run_dir: Path, rank: int) -> None:
    """Dump the stacks of this process at each SIGUSR1.

    faulthandler writes them in C, even while Python is blocked.
    """
    path = run_dir / "stacks" / f"rank{rank}.txt"
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab", 0, opener=no_symlink)  # noqa: SIM115 (used until the end)
        file.write(f"-- stacks of process {os.getpid()}, started {started}\n".encode())
    except OSError as error:
        warn(f"SIGUSR1 will write no stacks: {error!r}")
        return
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
