"""`selection.csv`: gates and block selection, one row for each logged step and layer."""

from __future__ import annotations

from pathlib import Path

from nsa.constants import BRANCHES
from nsa.monitor.metrics_csv import CsvAppender
from nsa.monitor.observer import DISTANCES, LayerHealth, Observer, RunInfo, StepRecord
from nsa.monitor.writer import BackgroundWriter

FILE_NAME = "selection.csv"
_GATES = {"": "gate_mean", "_std": "gate_std", "_saturated": "gate_saturated"}
_SELECTION = ("choosing", "forced", "entropy", "overlap", "distance")
COLUMNS = (
    "step",
    "layer",
    *(f"gate_{branch}{suffix}" for suffix in _GATES for branch in BRANCHES),
    *_SELECTION,
    *(f"distance_from_{edge}" for edge in DISTANCES),
)


class SelectionCsv(Observer):
    """Appends the health of every layer to `<run>/selection.csv`, on the writer's thread.

    A run without NSA layers has no such file.
    """

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._file: CsvAppender | None = None
        self._run_dir, self._start_step = Path(), 0

    def on_start(self, info: RunInfo) -> None:
        self._run_dir, self._start_step = info.run_dir, info.start_step
        if (info.run_dir / FILE_NAME).exists():
            self._open()

    def on_rollback(self, step: int) -> None:
        file = self._file
        if file is not None:
            self._writer.submit(lambda: file.restart(step))

    def on_step(self, record: StepRecord) -> None:
        if record.health is None:
            return
        file = self._file or self._open()
        rows = [
            [str(record.step), str(layer), *_cells(health)]
            for layer, health in enumerate(record.health.layers)
        ]
        self._writer.submit(lambda: file.append(rows))

    def _open(self) -> CsvAppender:
        self._file = CsvAppender(self._run_dir / FILE_NAME, COLUMNS)
        self._file.restart(self._start_step)
        return self._file


def _cells(health: LayerHealth) -> list[str]:
    values = [getattr(health, name)[branch] for name in _GATES.values() for branch in BRANCHES]
    values += [getattr(health, name) for name in _SELECTION]
    values += health.distances or [None] * len(DISTANCES)
    return ["" if value is None else f"{value:.6g}" for value in values]
