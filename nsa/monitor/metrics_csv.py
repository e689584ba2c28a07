"""`metrics.csv`: one row for each logged step; rows are dropped when their steps run again."""

from __future__ import annotations

from pathlib import Path

from nsa.atomic_io import append_whole, atomic_write_text
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


class CsvObserver(Observer):
    """Appends rows for each logged step to a file of the run, on the writer's thread.

    The first of the columns is `step`. The file is created with its first row.
    """

    file_name: str
    columns: tuple[str, ...]

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._path = Path()

    def rows(self, record: StepRecord) -> list[list[str]]:
        """Return the rows of a logged step; may be empty."""
        raise NotImplementedError

    def on_start(self, info: RunInfo) -> None:
        self._path = info.run_dir / self.file_name
        self._drop_rows_after(info.start_step)

    def on_rollback(self, step: int) -> None:
        self._writer.submit(lambda: self._drop_rows_after(step))

    def on_step(self, record: StepRecord) -> None:
        if rows := self.rows(record):
            self._writer.submit(lambda: self._append(rows))

    def _drop_rows_after(self, step: int) -> None:
        """Drop the rows after `step` and those that a crash tore."""
        if not self._path.exists():
            return
        header, _, rest = self._path.read_text().partition("\n")
        if header and header != ",".join(self.columns):
            raise ValueError(
                f"{self._path}: the columns are {header!r}, not {','.join(self.columns)!r}; "
                "move the file away"
            )
        commas = len(self.columns) - 1
        kept = [
            line
            for line in rest.split("\n")[:-1]
            if line.count(",") == commas and int(line.partition(",")[0]) <= step
        ]
        atomic_write_text(self._path, "\n".join([",".join(self.columns), *kept]) + "\n")

    def _append(self, rows: list[list[str]]) -> None:
        """Append all rows or none: a torn row on a full disk would spoil the next one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            header = [] if file.tell() else [self.columns]
            append_whole(file, "".join(",".join(row) + "\n" for row in (*header, *rows)).encode())


class MetricsCsv(CsvObserver):
    """Appends each logged step."""

    file_name, columns = FILE_NAME, COLUMNS

    def rows(self, record: StepRecord) -> list[list[str]]:
        """Return one row; floats read back exactly."""
        values = [(column, getattr(record, column)) for column in COLUMNS]
        integers = ("step", "tokens")
        return [
            [
                "" if value is None else repr(int(value) if name in integers else float(value))
                for name, value in values
            ]
        ]


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return the rows of a `metrics.csv`, oldest first; an empty cell is None."""
    return [{column: row.get(column) for column in COLUMNS} for row in read_table(path).rows]
