"""`selection.csv`: gates and block selection, one row for each logged step and layer."""

from __future__ import annotations

from nsa.monitor.metrics_csv import CsvObserver
from nsa.monitor.observer import LAYER_STATISTICS, StepRecord

FILE_NAME = "selection.csv"
COLUMNS = ("step", "layer", *LAYER_STATISTICS)


class SelectionCsv(CsvObserver):
    """Appends the health of every layer; a run without NSA layers has no such file."""

    file_name, columns = FILE_NAME, COLUMNS

    def rows(self, record: StepRecord) -> list[list[str]]:
        """Return a row for each layer."""
        rows = []
        for index, layer in enumerate(record.health.layers if record.health is not None else ()):
            values = [layer[name] for name in LAYER_STATISTICS]
            cells = ["" if value is None else f"{value:.6g}" for value in values]
            rows.append([str(record.step), str(index), *cells])
        return rows
