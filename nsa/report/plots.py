"""Line plots in panels side by side, drawn with matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, distinct for colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SMOOTHED_FROM = 50  # points; shorter curves are not smoothed
_MAX_POINTS = 600  # of a curve's faint range; a picture cannot show more
_COLUMNS = 4  # panels in a row

Points = tuple[Sequence[float], Sequence[float]]  # steps, values


@dataclass(frozen=True)
class Panel:
    """One pair of axes with labelled curves."""

    title: str
    curves: Mapping[str, Points]  # by label
    marked: bool = False  # draw a marker at each point
    ordered: bool = False  # the curves are layers, first to last: shade them
    x: str = "step"
    x_doubles: bool = False  # logarithmic x axis, base 2
    # Half widths of the error bars of marked curves.
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict)


def draw(panels: Sequence[Panel], out: Path, *, width: float = 6.0) -> None:
    """Draw the panels into one picture; the suffix of `out` sets the format."""
    from matplotlib.figure import Figure  # late: takes a second

    # A Figure without pyplot draws with Agg and touches no global state and no display.
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(width * columns, 4.0 * rows), dpi=100)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    # Fixed margins: automatic layouts draw everything twice.
    inch_x, inch_y = 1 / figure.get_figwidth(), 1 / figure.get_figheight()
    figure.subplots_adjust(
        0.75 * inch_x, 0.5 * inch_y, 1 - 0.1 * inch_x, 1 - 0.15 * inch_y, wspace=0.25, hspace=0.2
    )
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in list(axes)[len(panels) :]:
        axis.set_axis_off()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(out)
    except ValueError as error:
        raise ValueError(f"{out}: {error}") from error


def _draw_panel(axis: Any, panel: Panel) -> None:
    axis.set_xlabel(panel.x)
    if panel.x_doubles:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylabel(panel.title)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)
    drawn = {label: points for label, points in panel.curves.items() if points[0]}
    for index, (label, (steps, values)) in enumerate(drawn.items()):
        name = label.replace("$", r"\$")
        colour = _shade(index, len(drawn)) if panel.ordered else COLOURS[index % len(COLOURS)]
        if panel.marked:
            style = {"marker": "o", "markersize": 3}
            error = panel.errors.get(label)
            axis.errorbar(steps, values, error, label=name, color=colour, linewidth=1.4, **style)
            continue
        if len(values) >= _SMOOTHED_FROM:
            if not panel.ordered:  # the range of neighbouring values, faint
                stride = -(-len(values) // _MAX_POINTS)
                parts = [values[at : at + stride] for at in range(0, len(values), stride)]
                limits = list(map(min, parts)), list(map(max, parts))
                faint = {"color": colour, "alpha": 0.25, "linewidth": 0.8}
                axis.fill_between(steps[::stride], *limits, **faint)
            values = running_mean(values, len(values) // 50)
        axis.plot(steps, values, label=name, color=colour, linewidth=1.4)
    if len(drawn) > 1 or panel.marked or not panel.ordered:
        axis.legend(frameon=False, ncols=2 if len(drawn) > 6 else 1, fontsize="small")


def running_mean(values: Sequence[float], width: int) -> Sequence[float]:
    """Return the mean over up to `width` values on each side; fewer at the ends."""
    import numpy as np  # not at the top: `nsa --help` imports this module

    window = np.ones(2 * width + 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    return list(np.convolve(values, window, "same") / counts)


def _shade(index: int, count: int) -> tuple[float, ...]:
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * index / max(1, count - 1))
