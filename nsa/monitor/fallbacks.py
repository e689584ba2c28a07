"""`fallbacks.csv`: backends that `auto` could not use in this process, with reason and count."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path

from nsa.atomic_io import atomic_write_text
from nsa.monitor.observer import Observer, RunInfo, StepRecord
from nsa.monitor.writer import BackgroundWriter

FILE_NAME = "fallbacks.csv"
COLUMNS = ("operation", "backend", "reason", "calls")
Counts = Mapping[tuple[str, str, str], int]  # calls by operation, backend and reason


class Fallbacks(Observer):
    """Writes `<run>/fallbacks.csv` at logged steps if counts changed, and at the end."""

    def __init__(self, writer: BackgroundWriter, counts: Callable[[], Counts]) -> None:
        self._writer = writer
        self._counts = counts
        self._written: Counts = {}
        self._path = Path()

    def on_start(self, info: RunInfo) -> None:
        self._path = info.run_dir / FILE_NAME

    def on_step(self, record: StepRecord) -> None:
        if self._counts() != self._written:
            self._write()

    def on_end(self, status: str) -> None:
        self._write()

    def _write(self) -> None:
        counts = self._written = dict(self._counts())
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows([COLUMNS, *([*key, calls] for key, calls in sorted(counts.items()))])
        self._writer.submit(lambda: atomic_write_text(self._path, text.getvalue()))
