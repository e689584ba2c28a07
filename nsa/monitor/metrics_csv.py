"""`metrics.csv`: one row for each logged step."""

from __future__ import annotations

from pathlib import Path

from nsa.monitor.artifacts import read_table
from nsa.monitor.csv_appender import CsvAppender
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
