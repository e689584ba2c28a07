"""Line plots in rows of two panels, drawn with matplotlib without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

from nsa.atomic_io import atomic_write

# Okabe and Ito's colours, distinct for colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SMOOTHING = 50  # a curve of 50 points or more is smoothed over a 50th of them on each side
_SMALLEST_RANGE = 1e-3  # of a y axis, relative to its values: a smaller one shows rounding noise
_CHARACTERS_PER_INCH = 11  # in the legend and the titles

Points = tuple[Sequence[float], Sequence[float]]  # steps, values


@dataclass(frozen=True)
class Panel:
    """One pair of axes with labelled curves."""

    title: str
    curves: Mapping[str, Points]  # by label
    marked: bool = False  # draw a marker at each point
    ordered: bool = False  # the curves are layers, first to last: shade them
    fraction: bool = False  # y axis from 0 to 1
    logarithmic: bool = False  # y axis
    x: str = "step"
    x_doubles: bool = False  # logarithmic x axis, base 2
    # Half widths of the error bars of marked curves.
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict)


def draw(panels: Sequence[Panel], out: Path, *, width: float = 4.5) -> None:
    """Draw the panels into one picture; the suffix of `out` sets the format."""
    from matplotlib.figure import Figure  # slow import

    # A Figure without pyplot draws with Agg and touches no global state and no display.
    columns = min(2, len(panels))  # a page is about 900 pixels wide
    rows = -(-len(panels) // columns)
    size = (width * columns, (3.2 if rows > 1 else 3.8) * rows)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves))
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, labels, int(width * _CHARACTERS_PER_INCH))
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    legend: dict[str, Any] = {}  # lines by label, of all panels: one legend, which covers no curve
    for axis in axes:
        lines, names = axis.get_legend_handles_labels()
        legend |= dict(zip(names, lines, strict=True))
    if len(legend) > 1 or not all(panel.ordered for panel in panels):
        style: dict[str, Any] = {"loc": "outside upper left", "frameon": False, "fontsize": "small"}
        figure.legend(list(legend.values()), list(legend), **style)
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=out.suffix[1:] or "png")
    except ValueError as error:
        raise ValueError(f"{out}: {error}") from error
    atomic_write(out, picture.getvalue())


def _draw_panel(axis: Any, panel: Panel, labels: list[str], characters: int) -> None:
    """Draw one panel; `labels` of all panels' curves give a label the same colour in each panel."""
    from matplotlib import colormaps

    axis.set_xlabel(panel.x)
    if panel.x_doubles:
        axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.7g}")
    axis.set_title(fill(panel.title, characters), loc="left", fontsize="medium")
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.margins(x=0.01)
    for label, (steps, values) in panel.curves.items():
        if not steps:
            continue
        index = labels.index(label)
        colour: Any = COLOURS[index % len(COLOURS)]
        if panel.ordered:
            colour = colormaps["viridis"](0.9 * index / max(1, len(labels) - 1))
        line = {
            "label": fill(label.replace("$", r"\$"), characters),
            "color": colour,
            "linewidth": 1.4,
            "marker": "o" if panel.marked or len(steps) == 1 else None,  # a line needs two points
            "markersize": 3,
        }
        if panel.marked:
            axis.errorbar(steps, values, panel.errors.get(label), **line)
            continue
        if len(values) >= _SMOOTHING:
            if not panel.ordered:  # also draw the values themselves, so that spikes are visible
                axis.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            values = running_mean(values, len(values) // _SMOOTHING)
        axis.plot(steps, values, **line)
    _scale_y(axis, panel)


def _scale_y(axis: Any, panel: Panel) -> None:
    """Set the limits and plain numbers, without an offset or a factor beside the axis."""
    low, high = axis.dataLim.intervaly
    if low > high:  # no points
        return
    if panel.logarithmic and low > 0:
        axis.set_yscale("log")
    elif panel.fraction:
        axis.set_ylim(-0.02, 1.02)
    elif high - low < _SMALLEST_RANGE * abs(high):
        axis.set_ylim(low - _SMALLEST_RANGE * abs(high), high + _SMALLEST_RANGE * abs(high))
    axis.yaxis.set_major_formatter("{x:,.7g}")


def running_mean(values: Sequence[float], width: int) -> Sequence[float]:
    """Return the mean over up to `width` values on each side; fewer at the ends."""
    import numpy as np  # not at the top: `nsa --help` imports this module

    window = np.ones(2 * width + 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    return list(np.convolve(values, window, "same") / counts)
