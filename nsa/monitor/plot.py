"""One picture of one or several runs, drawn from their `metrics.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.monitor.metrics_csv import FILE_NAME, read_metrics

# Okabe and Ito's colours, told apart by colour-blind readers and in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SMOOTHED_FROM = 50  # rows; a shorter run is drawn as it is


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Draw loss, and held-out bits per byte where measured, against steps; `out` names the file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plotting needs matplotlib: pip install 'nsa-m7c[dev]'") from error
    if not runs:
        raise ValueError("runs = []: name at least one run's folder")
    curves = {label: _read(run) for label, run in zip(_labels(runs), runs, strict=True)}
    panels = [("loss", "training loss (nats per token)")]
    if any(_points(rows, "bits_per_byte")[0] for rows in curves.values()):
        panels.append(("bits_per_byte", "held-out bits per byte"))

    # A Figure of its own draws with Agg and leaves pyplot's global state, and any display, alone.
    figure = Figure(figsize=(6.0 * len(panels), 4.0), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (column, title) in zip(axes, panels, strict=True):
        for index, (label, rows) in enumerate(curves.items()):
            steps, values = _points(rows, column)
            if steps:
                colour = _COLOURS[index % len(_COLOURS)]
                _draw(axis, steps, values, label, colour, marked=column == "bits_per_byte")
        axis.set_xlabel("step")
        axis.set_ylabel(title)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
        axis.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _draw(
    axis: Any, steps: list[int], values: list[float], label: str, colour: str, *, marked: bool
) -> None:
    """A line; many noisy points become a faint line behind their running mean."""
    if marked:
        axis.plot(steps, values, label=label, color=colour, marker="o", markersize=3, linewidth=1.4)
        return
    if len(values) >= _SMOOTHED_FROM:
        axis.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        values = _running_mean(values, len(values) // 50)
    axis.plot(steps, values, label=label, color=colour, linewidth=1.4)


def _running_mean(values: list[float], width: int) -> list[float]:
    """The mean of the values around each one, `width` to either side: so it does not lag."""
    windows = (values[max(0, at - width) : at + width + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _points(rows: list[dict[str, Any]], column: str) -> tuple[list[int], list[float]]:
    measured = [row for row in rows if row[column] is not None]
    return [row["step"] for row in measured], [row[column] for row in measured]


def _labels(runs: Sequence[Path]) -> list[str]:
    """The folders' names; with their parents' where two runs are called the same."""
    names = [run.resolve().name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [str(run) for run in runs]


def _read(run: Path) -> list[dict[str, Any]]:
    path = run / FILE_NAME
    if not path.exists():
        raise ValueError(f"{run} holds no {FILE_NAME}; give the folder of a run that has logged")
    rows = read_metrics(path)
    if not rows:
        raise ValueError(f"{path} holds no rows yet; wait for the first logged step")
    return rows
