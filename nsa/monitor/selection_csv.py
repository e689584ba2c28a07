"""`selection.csv`: gates and block selection, one row for each logged step and layer."""

from __future__ import annotations

from nsa.monitor.metrics_csv import CsvObserver
from nsa.monitor.observer import LAYER_STATISTICS, SELECTOR_LOSS, StepRecord
from nsa.monitor.writer import BackgroundWriter

FILE_NAME = "selection.csv"
COLUMNS = ("step", "layer", *LAYER_STATISTICS)


class SelectionCsv(CsvObserver):
    """Appends the health of every layer; a run without NSA layers has no such file."""

    file_name = FILE_NAME

    def __init__(self, writer: BackgroundWriter, selector_loss: bool = False) -> None:
        super().__init__(writer)
        self.columns = (*COLUMNS, SELECTOR_LOSS) if selector_loss else COLUMNS

    def rows(self, record: StepRecord) -> list[list[str]]:
        """Return a row for each layer."""
        rows = []
        for index, layer in enumerate(record.health.layers if record.health is not None else ()):
            values = [layer[name] for name in self.columns[2:]]
            cells = ["" if value is None else f"{value:.6g}" for value in values]
            rows.append([str(record.step), str(index), *cells])
        return rows
