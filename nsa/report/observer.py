"""The report, written at each gate."""

from __future__ import annotations

from pathlib import Path

from nsa.monitor.observer import Observer, RunInfo
from nsa.monitor.writer import BackgroundWriter


class Reporter(Observer):
    """Has the writer's thread make `report.md` from what is recorded by then."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._run_dir = Path()

    def on_start(self, info: RunInfo) -> None:
        self._run_dir = info.run_dir

    def on_gate(self, name: str, go: bool) -> None:
        self._writer.submit(self._write)

    def _write(self) -> None:
        from nsa.report.report import write_report  # late: it draws

        write_report(self._run_dir)
