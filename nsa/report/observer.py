"""Observer that writes report.md at each gate."""

from __future__ import annotations

from pathlib import Path

from nsa.monitor.observer import Observer, RunInfo
from nsa.monitor.writer import BackgroundWriter
from nsa.report.report import write_report


class Reporter(Observer):
    """Writes the report on the writer's thread."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._run_dir = Path()

    def on_start(self, info: RunInfo) -> None:
        self._run_dir = info.run_dir

    def on_gate(self, name: str, go: bool) -> None:
        self._writer.submit(lambda: write_report(self._run_dir))
