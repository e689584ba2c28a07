"""`metrics.csv`: one row for each logged step; rows are dropped when their steps run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from nsa.atomic_io import atomic_write_text
from nsa.monitor.artifacts import read_table
from nsa.monitor.observer import Observer, RunInfo, StepRecord
from nsa.monitor.writer import BackgroundWriter

FILE_NAME = "metrics.csv"
COLUMNS = (
    "step",
    "tokens",
    "loss",
    "val_loss",
    "bits_per_byte",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "mfu",
    "memory_gb",
    "seconds",
)


class CsvAppender:
    """Rows of cells under fixed columns, the first of which is `step`."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = ",".join(columns)

    def restart(self, step: int) -> None:
        """Create the file, or drop the rows after `step` and those that a crash tore."""
        text = self._path.read_text() if self._path.exists() else ""
        header, _, rest = text.partition("\n")
        if header and header != self._columns:
            raise ValueError(
                f"{self._path}: the columns are {header!r}, not {self._columns!r}; "
                "move the file away"
            )
        kept = [
            line
            for line in rest.split("\n")[:-1]
            if line.count(",") == self._columns.count(",") and int(line.partition(",")[0]) <= step
        ]
        atomic_write_text(self._path, "\n".join([self._columns, *kept]) + "\n")

    def append(self, rows: Iterable[Sequence[str]]) -> None:
        """Append all rows or none: a torn row on a full disk would spoil the next one."""
        lines = "".join(",".join(row) + "\n" for row in rows).encode()
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            written = file.write(lines)
            if written != len(lines):
                file.truncate(end)
                raise OSError(f"{self._path}: only {written} of {len(lines)} bytes were written")


class MetricsCsv(Observer):
    """Appends each logged step to `<run>/metrics.csv`, on the writer's thread."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._file: CsvAppender

    def on_start(self, info: RunInfo) -> None:
        self._file = CsvAppender(info.run_dir / FILE_NAME, COLUMNS)
        self._file.restart(info.start_step)

    def on_rollback(self, step: int) -> None:
        self._writer.submit(lambda: self._file.restart(step))

    def on_step(self, record: StepRecord) -> None:
        row = [_cell(record, column) for column in COLUMNS]
        self._writer.submit(lambda: self._file.append([row]))


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return the rows of a `metrics.csv`, oldest first; an empty cell is None."""
    return [{column: row.get(column) for column in COLUMNS} for row in read_table(path).rows]


def _cell(record: StepRecord, column: str) -> str:
    value = getattr(record, column)
    if value is None:
        return ""
    return repr(int(value) if column in ("step", "tokens") else float(value))
