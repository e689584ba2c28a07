"""`metrics.csv`, `selection.csv` and `fallbacks.csv`, written while a run trains.

A resumed or rolled back run drops the rows of the steps that run again.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path

from nsa.atomic_io import append_all_or_nothing, atomic_write_text
from nsa.monitor.artifacts import read_table
from nsa.monitor.observer import LAYER_STATISTICS, SELECTOR_LOSS, Observer, RunInfo, StepRecord

METRICS_FILE, SELECTION_FILE, FALLBACKS_FILE = "metrics.csv", "selection.csv", "fallbacks.csv"
INTEGERS = ("step", "tokens")
METRICS_COLUMNS = (
    *INTEGERS,
    *("loss", "val_loss", "bits_per_byte", "lr", "grad_norm"),
    *("tokens_per_s", "mfu", "memory_gb", "seconds"),
)
SELECTION_COLUMNS = ("step", "layer", *LAYER_STATISTICS)
FALLBACK_COLUMNS = ("operation", "backend", "reason", "calls")
Counts = Mapping[tuple[str, str, str], int]  # calls by operation, backend and reason


class CsvObserver(Observer):
    """Appends the rows of each logged step to a file, which its first row creates.

    The first of `columns` is `step`.
    """

    file_name: str
    columns: tuple[str, ...]
    _path: Path | None = None  # None before `on_start`, and if that raised

    def rows(self, record: StepRecord) -> list[list[str]]:
        """Return the rows of a logged step; may be empty."""
        raise NotImplementedError

    def on_start(self, info: RunInfo) -> None:
        path = info.run_dir / self.file_name
        self._drop_rows_after(path, info.start_step)
        self._path = path

    def on_rollback(self, step: int) -> None:
        if self._path is not None:
            self._drop_rows_after(self._path, step)

    def on_step(self, record: StepRecord) -> None:
        if self._path is not None and (rows := self.rows(record)):
            self._append(self._path, rows)

    def _drop_rows_after(self, path: Path, step: int) -> None:
        """Drop the rows after `step` and those that a crash cut off."""
        if not path.exists():
            return
        header, _, rest = path.read_text().partition("\n")
        if header and header != ",".join(self.columns):
            raise ValueError(
                f"{path}: the columns are {header!r}, not {','.join(self.columns)!r}; "
                "move the file away"
            )
        commas = len(self.columns) - 1
        kept = [
            line
            for line in rest.split("\n")[:-1]
            if line.count(",") == commas and int(line.partition(",")[0]) <= step
        ]
        atomic_write_text(path, "\n".join([",".join(self.columns), *kept]) + "\n")

    def _append(self, path: Path, rows: list[list[str]]) -> None:
        """Append all rows or none: on a full disk, a part of a row would damage the next one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            header = [] if file.tell() else [self.columns]
            lines = "".join(",".join(row) + "\n" for row in (*header, *rows))
            append_all_or_nothing(file, lines.encode())


class MetricsCsv(CsvObserver):
    """One row per logged step; floats read back exactly."""

    file_name, columns = METRICS_FILE, METRICS_COLUMNS

    def rows(self, record: StepRecord) -> list[list[str]]:
        cells = []
        for column in self.columns:
            value = getattr(record, column)
            kind = int if column in INTEGERS else float
            cells.append("" if value is None else repr(kind(value)))
        return [cells]


class SelectionCsv(CsvObserver):
    """One row per logged step and NSA layer; a dense run has no such file."""

    file_name = SELECTION_FILE

    def __init__(self, selector_loss: bool = False) -> None:
        self.columns = (*SELECTION_COLUMNS, SELECTOR_LOSS) if selector_loss else SELECTION_COLUMNS

    def rows(self, record: StepRecord) -> list[list[str]]:
        rows = []
        for index, layer in enumerate(record.health.layers if record.health is not None else ()):
            values = [layer[name] for name in self.columns[2:]]
            cells = ["" if value is None else f"{value:.6g}" for value in values]
            rows.append([str(record.step), str(index), *cells])
        return rows


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
