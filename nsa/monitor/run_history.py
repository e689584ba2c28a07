"""History of a run's logged steps in rank 0's memory: input of the gates, with `RankHistory`."""

from __future__ import annotations

from pathlib import Path

from nsa.constants import BRANCHES
from nsa.monitor import metrics_csv, selection_csv
from nsa.monitor.artifacts import Table, read_table
from nsa.monitor.observer import Observer, RunInfo, StepRecord

NEWEST = 500  # rows of selection.csv that are kept, a few logged steps


class RunHistory(Observer):
    """Keeps the rows of metrics.csv and the newest gates of selection.csv.

    A resumed run reads the rows of earlier processes once, at its start. 50,000 steps logged every
    10 take about 4 MB.
    """

    def __init__(self) -> None:
        self.metrics = Table(metrics_csv.FILE_NAME)
        self.selection = Table(selection_csv.FILE_NAME)

    def on_start(self, info: RunInfo) -> None:
        if info.start_step:
            self.load(info.run_dir, info.start_step)

    def load(self, run_dir: Path, step: int) -> None:
        """Read the rows up to `step` that earlier processes wrote."""
        self.metrics = read_table(run_dir / self.metrics.name)
        self.selection = read_table(run_dir / self.selection.name)
        self.on_rollback(step)

    def on_rollback(self, step: int) -> None:
        for table in (self.metrics, self.selection):
            table.rows = [row for row in table.rows if 1 <= row["step"] <= step]
        del self.selection.rows[:-NEWEST]

    def on_step(self, record: StepRecord) -> None:
        values = {column: getattr(record, column) for column in metrics_csv.COLUMNS}
        row = {name: float(value) for name, value in values.items() if value is not None}
        self.metrics.rows.append(row)
        for index, layer in enumerate(record.health.layers if record.health is not None else ()):
            gates = {f"gate_{branch}": layer[f"gate_{branch}"] or 0.0 for branch in BRANCHES}
            self.selection.rows.append({"step": float(record.step), "layer": float(index), **gates})
        del self.selection.rows[:-NEWEST]
