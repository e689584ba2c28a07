"""`metrics.csv`: a row for each logged step; one table however often the run resumes."""

from __future__ import annotations

from pathlib import Path

from nsa.monitor.observer import Observer, RunInfo, StepRecord
from nsa.monitor.table import Table
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
_WHOLE_NUMBERS = ("step", "tokens")


class MetricsCsv(Observer):
    """Appends the record of every logged step to `<run>/metrics.csv`, on the writer's thread."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._table = Table(Path(FILE_NAME), COLUMNS)

    def on_start(self, info: RunInfo) -> None:
        """Drop the rows of steps that this run is about to take again."""
        self._table = Table(info.run_dir / FILE_NAME, COLUMNS)
        self._table.restart(info.start_step)

    def on_rollback(self, step: int) -> None:
        self._writer.submit(lambda: self._table.restart(step))

    def on_step(self, record: StepRecord) -> None:
        row = [_cell(record, column) for column in COLUMNS]
        self._writer.submit(lambda: self._table.append([row]))


def read_metrics(path: Path) -> list[dict[str, float | int | None]]:
    """The rows of a `metrics.csv`, oldest first; an empty cell is None."""
    return Table(path, COLUMNS).numbers(_WHOLE_NUMBERS)


def _cell(record: StepRecord, column: str) -> str:
    value = getattr(record, column)
    if value is None:
        return ""
    return repr(int(value) if column in _WHOLE_NUMBERS else float(value))
