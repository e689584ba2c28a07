"""What a GPU benchmark has found so far: kept on disk after every case, printed, and drawn.

A run that is ended by its time limit, by a kernel that hangs or by a lost device has lost one case
and nothing that came before it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa.bench.gpu import DTYPES, DeviceLost, hardware, pick_device, recover
from nsa.bench.measure import environment
from nsa.report.plots import COLOURS


class Report:
    """The figures of one run, with what they were measured on and what was asked for."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.device = pick_device(flags.device)
        on_gpu = self.device.type == "cuda"
        self.dtype_name: str = flags.dtype or ("bf16" if on_gpu else "fp32")
        self.dtype = DTYPES[self.dtype_name]
        self._lost: str | None = None
        self._end = None if flags.limit is None else time.monotonic() + flags.limit
        self.data: dict[str, Any] = {
            "environment": {
                **environment(),
                "command": " ".join(["python -m nsa.bench", *flags.arguments]),
                "hardware": hardware(self.device),
            },
            "settings": {
                name: _plain(value) for name, value in vars(flags).items() if name != "arguments"
            }
            | {"dtype": self.dtype_name, "device": self.device.type},
            "finished": False,
            "rows": [],
            "skipped": [],
        }
        torch.manual_seed(0)
        self.write()

    def add(self, row: Mapping[str, Any], section: str = "rows") -> None:
        """Keep one case, on disk too."""
        self.data[section].append(dict(row))
        self.write()

    def attempt(self, case: str, run: Callable[[], None]) -> None:
        """Run one case; where time is over or it fails, it is listed with the reason instead."""
        why: str | None = self._lost
        if why is None and self._end is not None and time.monotonic() >= self._end:
            why = f"--limit {self.flags.limit:g} s over"
        if why is None:
            try:
                return run()
            except DeviceLost as error:
                why = self._lost = str(error)
            except Exception as error:  # one case, such as one too large, must not end the others
                try:
                    why = recover(error, self.device)
                except DeviceLost as lost:
                    why = self._lost = str(lost)
        self.data["skipped"].append({"case": case, "why": why})
        self.write()
        print(f"{case} NOT MEASURED: {why}", flush=True)

    def finish(self, **facts: Any) -> dict[str, Any]:
        """No case is left; `facts` are what follows from those that were measured."""
        self.data |= {"finished": not self.data["skipped"], **facts}
        self.write()
        return self.data

    def write(self) -> None:
        """Replace the file, so that a reader sees the last whole one."""
        if self.flags.out is None:
            return
        self.flags.out.parent.mkdir(parents=True, exist_ok=True)
        draft = self.flags.out.with_suffix(".part")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.flags.out)


def _plain(value: Any) -> Any:
    """A flag's value as JSON takes it."""
    if isinstance(value, list):
        return [getattr(item, "name", item) for item in value]
    return str(value) if isinstance(value, Path) else value


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """A quotient of two figures of the same run; None where one is missing."""
    return None if numerator is None or not denominator else numerator / denominator


def shown(figure: float | None, form: str = ".3g") -> str:
    """A figure in a table; a dash where there is none."""
    return "-" if figure is None else format(figure, form)


def table(rows: Iterable[Sequence[str]]) -> None:
    """Print rows in columns as wide as their widest cell, the first column to the left."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]), flush=True)


def check_plot(out: Path | None) -> None:
    """Refuse at the start what would otherwise end a run behind its first measurements."""
    try:
        if out is not None:
            import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plot {out} needs matplotlib: pip install 'nsa-m7c[dev]'") from error


def plot_lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], out: Path, unit: str
) -> None:
    """A panel a title, a line a label, over lengths."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    figure = Figure(figsize=(5.0 * max(1, len(panels)), 4.0), dpi=150, layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=False):
        for label, points in lines.items():
            at = labels.index(label)
            style = ("-", "--")[at // len(COLOURS) % 2]
            colour = COLOURS[at % len(COLOURS)]
            axis.plot(*zip(*points, strict=True), style, label=label, color=colour, marker="o")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens of a sequence")
        axis.set_ylabel(unit)
        axis.set_title(title)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.legend(frameon=False, fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
