"""Plots of `nsa tasks`: recall by distance and number of facts, and grids of needles."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nsa.evaluate.tasks.evaluate import by_model
from nsa.report.plots import Panel, draw


def draw_recall(result: Mapping[str, Any], out: Path) -> None:
    """Plot accuracy over the distance to the fact and over the number of facts; means of seeds."""
    by_distance, by_facts = {}, {}
    for name, rows in by_model(result).items():
        distance = _means(
            (cell["from"], cell["right"]) for row in rows for cell in row["by_distance"]
        )
        facts = _means((cell["facts"], cell["far"]) for row in rows for cell in row["by_facts"])
        by_distance[name] = (list(distance), list(distance.values()))
        by_facts[name] = (list(facts), list(facts.values()))
    common: dict[str, Any] = {"marked": True, "x_doubles": True}
    draw(
        [
            Panel("accuracy", by_distance, x="positions back to the fact, from", **common),
            Panel("accuracy beyond the reach of windows", by_facts, x="facts", **common),
        ],
        out,
    )


def draw_needle(result: Mapping[str, Any], out: Path) -> None:
    """Plot a grid for each model: depth of the needle by length of the context; means of seeds."""
    from matplotlib.figure import Figure  # late: it takes a second

    models = by_model(result)
    figure = Figure(figsize=(2.6 * len(models) + 0.8, 3.4), dpi=100, layout="constrained")
    axes = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axis, (name, rows) in zip(axes, models.items(), strict=True):
        cells = _means(
            ((cell["depth"], cell["seq_len"]), cell["right"])
            for row in rows
            for cell in row["needle"]
        )
        depths, lengths = (sorted(set(values)) for values in zip(*cells, strict=True))
        grid = [[cells[depth, length] for length in lengths] for depth in depths]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_title(name, fontsize="medium")
        axis.set_xlabel("tokens")
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=axes, label="accuracy")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _means(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    values: dict[Any, list[float]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return {key: statistics.fmean(values[key]) for key in sorted(values)}
