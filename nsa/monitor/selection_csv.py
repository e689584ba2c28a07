"""`selection.csv`: gates and block selection, one row for each logged step and layer."""

from __future__ import annotations

from nsa.constants import BRANCHES
from nsa.monitor.metrics_csv import CsvObserver
from nsa.monitor.observer import DISTANCES, LayerHealth, StepRecord

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


class SelectionCsv(CsvObserver):
    """Appends the health of every layer; a run without NSA layers has no such file."""

    file_name, columns = FILE_NAME, COLUMNS

    def rows(self, record: StepRecord) -> list[list[str]]:
        """Return a row for each layer."""
        layers = record.health.layers if record.health is not None else ()
        return [
            [str(record.step), str(index), *_cells(layer)] for index, layer in enumerate(layers)
        ]


def _cells(health: LayerHealth) -> list[str]:
    values = [getattr(health, name)[branch] for name in _GATES.values() for branch in BRANCHES]
    values += [getattr(health, name) for name in _SELECTION]
    values += health.distances or [None] * len(DISTANCES)
    return ["" if value is None else f"{value:.6g}" for value in values]
