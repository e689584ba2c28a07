"""Peak memory, snapshots before and after selected steps, and advice when memory runs out."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from nsa.atomic_io import append
from nsa.monitor.observer import BackgroundWriter
from nsa.text import first_line

_OOM_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


class MemorySnapshots:
    """Writes `<run>/memory/rank<k>.jsonl` before and after the first and every `every`-th step.

    It reads the allocator's counters on the host, and never waits for the device. With `every` = 0
    it writes a snapshot only when memory runs out.
    """

    def __init__(self, folder: Path, rank: int, every: int) -> None:
        self._path = folder / "memory" / f"rank{rank}.jsonl"
        self._rank = rank
        self._every = every
        self._step = 0
        self._first: int | None = None
        self._writer = BackgroundWriter("memory") if every else None

    def take(self, step: int, when: str) -> None:
        """Write a snapshot if one is due; `when` is "before" or "after" `step`, counted from 1."""
        self._step = step
        self._first = self._first or step
        if self._writer is not None and (step == self._first or step % self._every == 0):
            line = self._line(when)
            self._writer.submit(lambda: append(self._path, line))

    def out_of_memory(self, error: BaseException) -> str | None:
        """If `error` means that memory ran out, write a snapshot and return advice."""
        if not is_out_of_memory(error):
            return None
        try:
            append(self._path, self._line("out of memory"))
            cuda = initialized_cuda()
            if cuda is not None:  # for PyTorch's memory viewer, pytorch.org/memory_viz
                cuda.memory._dump_snapshot(str(self._path.with_suffix(".pickle")))
            where = f"; details are in {self._path}"
        except Exception as failure:
            where = f"; details could not be written: {failure!r}"
        reason = first_line(error).rstrip(".")
        return (
            f"rank {self._rank} ran out of memory at step {self._step}: {reason}. "
            "Lower train.micro_batch (and raise train.accumulation), set "
            "model.activation_checkpointing to selective or reentrant, or lower data.seq_len"
            f"{where}"
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _line(self, when: str) -> str:
        import psutil  # late: only snapshots need it

        cuda = initialized_cuda()
        snapshot = {
            "time": round(time.time(), 3),
            "step": self._step,
            "when": when,
            "allocated_gb": cuda.memory_allocated() / 1e9 if cuda else None,
            "reserved_gb": cuda.memory_reserved() / 1e9 if cuda else None,
            "peak_gb": cuda.max_memory_allocated() / 1e9 if cuda else None,
            "resident_gb": psutil.Process().memory_info().rss / 1e9,
            "available_gb": psutil.virtual_memory().available / 1e9,
        }
        return json.dumps(snapshot) + "\n"


def initialized_cuda() -> Any | None:
    """Return `torch.cuda` if this process uses it; do not import torch."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def memory_gb(device: int | None = None) -> float:
    """Return the peak memory so far in 10^9 bytes: of the CUDA device, else of the process."""
    if (cuda := initialized_cuda()) is not None:
        return cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that the device or the host ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(message in text for message in _OOM_MESSAGES)
