"""History of a run's logged steps in rank 0's memory: input of the gates, with `RankHistory`."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from nsa.constants import BRANCHES
from nsa.monitor import metrics_csv, selection_csv
from nsa.monitor.artifacts import Row, Table, read_table
from nsa.monitor.observer import Observer, RunInfo, StepRecord

_GATES = [f"gate_{branch}" for branch in BRANCHES]
NEWEST = 5  # logged steps whose gates are kept


class RunHistory(Observer):
    """Keeps the rows of metrics.csv and the newest gates of selection.csv.

    A resumed run reads the rows of earlier processes once, at its start. 50,000 steps logged every
    10 take about 4 MB.
    """

    def __init__(self) -> None:
        self.metrics = Table(metrics_csv.FILE_NAME)
        self._gates: deque[list[Row]] = deque(maxlen=NEWEST)  # per step: a row for each layer
        self._gates_problem = ""

    @property
    def selection(self) -> Table:
        """The newest mean gates of each layer, with the columns of selection.csv."""
        rows = [row for layers in self._gates for row in layers]
        return Table(selection_csv.FILE_NAME, rows, self._gates_problem)

    def on_start(self, info: RunInfo) -> None:
        if info.start_step:
            self.load(info.run_dir, info.start_step)

    def load(self, run_dir: Path, step: int) -> None:
        """Read the rows up to `step` that earlier processes wrote."""
        self.metrics = read_table(run_dir / metrics_csv.FILE_NAME)
        selection = read_table(run_dir / selection_csv.FILE_NAME)
        self._gates_problem = selection.problem
        by_step: dict[float, list[Row]] = {}
        for row in selection.rows:
            by_step.setdefault(row["step"], []).append(row)
        self._gates.extend(layers for at, layers in by_step.items() if at <= step)
        self.on_rollback(step)

    def on_rollback(self, step: int) -> None:
        self.metrics.rows = [row for row in self.metrics.rows if 1 <= row["step"] <= step]
        kept = [layers for layers in self._gates if layers[0]["step"] <= step]
        self._gates = deque(kept, NEWEST)

    def on_step(self, record: StepRecord) -> None:
        values = {column: getattr(record, column) for column in metrics_csv.COLUMNS}
        row = {name: float(value) for name, value in values.items() if value is not None}
        self.metrics.rows.append(row)
        if record.health is not None:
            self._gates.append(
                [
                    {"step": float(record.step), "layer": float(index)}
                    | {name: layer[name] or 0.0 for name in _GATES}
                    for index, layer in enumerate(record.health.layers)
                ]
            )
