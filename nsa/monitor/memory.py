"""How much memory a rank holds around chosen steps, and what to do when there was too little."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from nsa.monitor.history import HistoryRecorder
from nsa.monitor.writer import BackgroundWriter

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


class MemorySnapshots:
    """Lines in `<folder>/memory/rank<k>.jsonl` before and after every so many steps.

    The first step that is taken is among them. The device is asked for nothing: its allocator's
    books are kept on the host. `every` 0 leaves only what running out of memory writes.
    """

    def __init__(
        self, folder: Path, rank: int, every: int, history: HistoryRecorder | None = None
    ) -> None:
        self._path = folder / "memory" / f"rank{rank}.jsonl"
        self._rank = rank
        self._every = every
        self._history = history
        self._step = 0
        self._first: int | None = None
        self._writer = BackgroundWriter("memory") if every else None

    def before(self, step: int) -> None:
        """Step number `step`, counted from 1, is about to be done."""
        self._step = step
        self._first = self._first or step
        self._take(step, "before")

    def after(self, step: int) -> None:
        """Step number `step` is done."""
        self._take(step, "after")

    def out_of_memory(self, error: BaseException) -> str | None:
        """A line that says what to do if `error` means that memory ran out; None if it doesn't."""
        if not is_out_of_memory(error):
            return None
        try:
            _append(self._path, self._line(self._step, "out of memory"))
            self._write_cuda_snapshot()
            where = f"; the figures are in {self._path}"
        except Exception as failure:
            where = f"; the figures could not be written: {failure!r}"
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return (
            f"rank {self._rank} ran out of memory at step {self._step}: {told} "
            "Lower train.micro_batch (and raise train.accumulation), set "
            "model.activation_checkpointing to selective or reentrant, or lower data.seq_len"
            f"{where}"
        )

    def close(self) -> None:
        """Finish writing."""
        if self._writer is not None:
            self._writer.close()

    def _take(self, step: int, when: str) -> None:
        if self._writer is not None and (step == self._first or step % self._every == 0):
            line = self._line(step, when)
            if self._history is not None:
                self._history.add_snapshot(line)
            self._writer.submit(lambda: _append(self._path, line))

    def _line(self, step: int, when: str) -> dict[str, Any]:
        return {"time": round(time.time(), 3), "step": step, "when": when, **_figures()}

    def _write_cuda_snapshot(self) -> None:
        """What PyTorch's memory viewer (pytorch.org/memory_viz) shows, block by block."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(str(self._path.with_suffix(".pickle")))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device or the machine had no memory left."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()  # torch's own errors of this kind are RuntimeErrors, and say it
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def _figures() -> dict[str, float | None]:
    import psutil  # late: it costs what only a snapshot needs

    allocated = reserved = peak = None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        allocated = torch.cuda.memory_allocated() / 1e9
        reserved = torch.cuda.memory_reserved() / 1e9
        peak = torch.cuda.max_memory_allocated() / 1e9
    return {
        "allocated_gb": allocated,
        "reserved_gb": reserved,
        "peak_gb": peak,
        "resident_gb": psutil.Process().memory_info().rss / 1e9,
        "available_gb": psutil.virtual_memory().available / 1e9,
    }


def _append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
