"""`metrics.csv`, `selection.csv`, `teacher.csv` and `fallbacks.csv`, written while a run trains.

A resumed run drops the rows of the steps that run again. A file with other columns, of another
version or other settings, is moved to `metrics.1.csv`, or the next free number.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nsa.atomic_io import append_all_or_nothing, atomic_write_text, no_symlink
from nsa.monitor.artifacts import read_table
from nsa.monitor.observer import (
    LAYER_STATISTICS,
    METRICS_COLUMNS,
    SELECTOR_STATISTICS,
    TEACHER_COLUMNS,
    Observer,
    RunInfo,
    StepRecord,
    warn,
)

METRICS_FILE, SELECTION_FILE, FALLBACKS_FILE = "metrics.csv", "selection.csv", "fallbacks.csv"
TEACHER_FILE = "teacher.csv"
SELECTION_COLUMNS = ("step", "layer", *LAYER_STATISTICS)
FALLBACK_COLUMNS = ("operation", "backend", "reason", "calls")
Cells = Mapping[str, float | None]  # of a row, by column
Counts = Mapping[tuple[str, str, str], int]  # calls by operation, backend and reason


class CsvObserver(Observer):
    """Appends the rows of each logged step to a file, which its first row creates.

    The first of `columns` is `step`.
    """

    file_name: str
    columns: tuple[str, ...]
    number = "{:.6g}"  # format of a float
    _path: Path | None = None  # None before `on_start`, and if that raised

    def rows(self, record: StepRecord) -> Sequence[Cells]:
        """Return the rows of a logged step, which may have more than `columns`; may be empty."""
        raise NotImplementedError

    def on_start(self, info: RunInfo) -> None:
        path = info.run_dir / self.file_name
        self._drop_rows_after(path, info.start_step)
        self._path = path

    def on_step(self, record: StepRecord) -> None:
        if self._path is not None and (rows := self.rows(record)):
            cells = [[self._cell(row.get(column)) for column in self.columns] for row in rows]
            self._append(self._path, cells)

    def _cell(self, value: float | None) -> str:
        if value is None:
            return ""
        return str(value) if isinstance(value, int) else self.number.format(value)

    def _drop_rows_after(self, path: Path, step: int) -> None:
        """Drop the rows after `step` and those that a crash cut off."""
        if not path.exists():
            return
        header, *lines = path.read_text(errors="replace").split("\n")
        if header and header != ",".join(self.columns):
            numbered = (path.with_suffix(f".{number}.csv") for number in itertools.count(1))
            aside = next(name for name in numbered if not name.exists())
            path.rename(aside)
            warn(f"{path}: has other columns ({header[:80]!r}); moved to {aside.name}")
            return
        kept = [
            line
            for line in lines[:-1]
            if line.count(",") == len(self.columns) - 1
            and (number := line.partition(",")[0]).isdecimal()
            and int(number) <= step
        ]
        atomic_write_text(path, "\n".join([",".join(self.columns), *kept]) + "\n")

    def _append(self, path: Path, rows: list[list[str]]) -> None:
        """Append all rows or none: on a full disk, a part of a row would damage the next one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", 0, opener=no_symlink) as file:
            header = [] if file.tell() else [self.columns]
            lines = "".join(",".join(row) + "\n" for row in (*header, *rows))
            append_all_or_nothing(file, lines.encode())


class MetricsCsv(CsvObserver):
    """One row per logged step; floats read back exactly."""

    file_name, columns, number = METRICS_FILE, METRICS_COLUMNS, "{!r}"

    def rows(self, record: StepRecord) -> Sequence[Cells]:
        return [vars(record)]


class SelectionCsv(CsvObserver):
    """One row per logged step and NSA layer; a dense run has no such file."""

    file_name = SELECTION_FILE

    def __init__(self, selector_loss: bool = False) -> None:
        self.columns = (*SELECTION_COLUMNS, *(SELECTOR_STATISTICS if selector_loss else ()))

    def rows(self, record: StepRecord) -> Sequence[Cells]:
        return record.layers


class TeacherCsv(CsvObserver):
    """One row per validation and range of positions; only a run with a teacher has this file."""

    file_name, columns = TEACHER_FILE, ("step", *TEACHER_COLUMNS)

    def rows(self, record: StepRecord) -> Sequence[Cells]:
        return [{"step": record.step, **row} for row in record.versus_teacher]


class FallbacksCsv(Observer):
    """One row per operation and backend that `auto` could not use in this process, and why.

    Rewritten at logged steps if a count changed, and at the end.
    """

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._counts = counts
        self._written: Counts = {}
        self._path = Path()

    def on_start(self, info: RunInfo) -> None:
        self._path = info.run_dir / FALLBACKS_FILE

    def on_step(self, record: StepRecord) -> None:
        if self._counts() != self._written:
            self._write()

    def on_end(self, status: str) -> None:
        self._write()

    def _write(self) -> None:
        counts, text = dict(self._counts()), io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows([FALLBACK_COLUMNS, *([*key, n] for key, n in sorted(counts.items()))])
        atomic_write_text(self._path, text.getvalue())
        self._written = counts


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return the rows of a `metrics.csv`, oldest first; an empty cell is None."""
    rows = read_table(path).rows
    return [{column: row.get(column) for column in METRICS_COLUMNS} for row in rows]
