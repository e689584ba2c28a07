"""`metrics.csv`: a row for each logged step; one table however often the run resumes."""

from __future__ import annotations

from pathlib import Path

from nsa.disk import atomic_write_text
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
_WHOLE_NUMBERS = ("step", "tokens")
_HEADER = ",".join(COLUMNS) + "\n"


class MetricsCsv(Observer):
    """Appends the record of every logged step to `<run>/metrics.csv`, on the writer's thread."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._path = Path()

    def on_start(self, info: RunInfo) -> None:
        """Drop the rows of steps that this run is about to take again."""
        self._path = info.run_dir / FILE_NAME
        rows = _whole_rows(self._path) if self._path.exists() else []
        kept = [",".join(row) + "\n" for row in rows if int(row[0]) <= info.start_step]
        atomic_write_text(self._path, _HEADER + "".join(kept))

    def on_step(self, record: StepRecord) -> None:
        line = ",".join(_cell(record, column) for column in COLUMNS) + "\n"
        self._writer.submit(lambda: _append(self._path, line.encode()))


def read_metrics(path: Path) -> list[dict[str, float | int | None]]:
    """The rows of a `metrics.csv`, oldest first; an empty cell is None."""
    return [
        {column: _value(column, cell) for column, cell in zip(COLUMNS, row, strict=True)}
        for row in _whole_rows(path)
    ]


def _cell(record: StepRecord, column: str) -> str:
    value = getattr(record, column)
    if value is None:
        return ""
    return repr(int(value) if column in _WHOLE_NUMBERS else float(value))


def _value(column: str, cell: str) -> float | int | None:
    if not cell:
        return None
    return int(cell) if column in _WHOLE_NUMBERS else float(cell)


def _whole_rows(path: Path) -> list[list[str]]:
    """The rows as cells, without a last one that a crash tore."""
    header, _, rest = path.read_text().partition("\n")
    if header and header + "\n" != _HEADER:
        raise ValueError(
            f"{path} has the columns {header!r}, not {_HEADER.strip()!r}; move it away"
        )
    rows = [line.split(",") for line in rest.split("\n")[:-1]]
    return [row for row in rows if len(row) == len(COLUMNS)]


def _append(path: Path, line: bytes) -> None:
    """Append the whole line or nothing: on a full disk a part of it would spoil the next row."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        written = file.write(line)
        if written != len(line):
            file.truncate(end)
            raise OSError(f"only {written} of {len(line)} bytes fitted into {path}")
