"""`selection.csv`: gates and selection of each layer, a row for each logged step and layer."""

from __future__ import annotations

from pathlib import Path

from nsa.monitor.observer import BRANCHES, DISTANCES, LayerHealth, Observer, RunInfo, StepRecord
from nsa.monitor.table import Table
from nsa.monitor.writer import BackgroundWriter

FILE_NAME = "selection.csv"
_GATES = {"": "gate_mean", "_std": "gate_std", "_saturated": "gate_saturated"}
_PICKS = ("choosing", "forced", "entropy", "overlap", "distance")
COLUMNS = (
    "step",
    "layer",
    *(f"gate_{branch}{suffix}" for suffix in _GATES for branch in BRANCHES),
    *_PICKS,
    *(f"distance_from_{edge}" for edge in DISTANCES),
)
_WHOLE_NUMBERS = ("step", "layer")


class SelectionCsv(Observer):
    """Appends the health of every layer to `<run>/selection.csv`, on the writer's thread.

    A run that has no health to tell, such as the dense twin's, gets no file.
    """

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._table: Table | None = None
        self._run_dir, self._start_step = Path(), 0

    def on_start(self, info: RunInfo) -> None:
        """Drop the rows of steps that this run is about to take again."""
        self._run_dir, self._start_step = info.run_dir, info.start_step
        if (info.run_dir / FILE_NAME).exists():
            self._open()

    def on_rollback(self, step: int) -> None:
        table = self._table
        if table is not None:
            self._writer.submit(lambda: table.restart(step))

    def on_step(self, record: StepRecord) -> None:
        if record.health is None:
            return
        table = self._table or self._open()
        rows = [
            [str(record.step), str(layer), *_cells(health)]
            for layer, health in enumerate(record.health.layers)
        ]
        self._writer.submit(lambda: table.append(rows))

    def _open(self) -> Table:
        self._table = Table(self._run_dir / FILE_NAME, COLUMNS)
        self._table.restart(self._start_step)
        return self._table


def read_selection(path: Path) -> list[dict[str, float | int | None]]:
    """The rows of a `selection.csv`, oldest first, of one step by layer; an empty cell is None."""
    return Table(path, COLUMNS).numbers(_WHOLE_NUMBERS)


def _cells(health: LayerHealth) -> list[str]:
    figures = [getattr(health, figure)[branch] for figure in _GATES.values() for branch in BRANCHES]
    figures += [getattr(health, figure) for figure in _PICKS]
    figures += health.distances or [None] * len(DISTANCES)
    return ["" if figure is None else f"{figure:.6g}" for figure in figures]
