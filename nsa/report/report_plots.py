"""Plots of a report: each is drawn only if its values were recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nsa.constants import BRANCHES
from nsa.monitor.artifacts import Table, read_table
from nsa.report.plots import Panel, Points, draw
from nsa.report.summary import Summary

FOLDER = "report"
_SELECTION = {
    "entropy": "entropy of free picks",
    "overlap": "overlap with the previous token's blocks",
    "forced": "fraction of forced picks",
    "distance": "mean distance of free picks, blocks",
    "selector_loss": "selector loss, nats",
}


def draw_plots(run: Summary) -> list[tuple[str, str]]:
    """Draw into `<run>/report`; return titles and paths relative to report.md."""
    drawn = []
    for name, title, panels in _plots(run):
        present = [panel for panel in panels if any(steps for steps, _ in panel.curves.values())]
        if present:
            draw(present, run.run_dir / FOLDER / f"{name}.png", width=4.5 if present[1:] else 7.0)
            drawn.append((title, f"{FOLDER}/{name}.png"))
    return drawn


def _plots(run: Summary) -> Iterator[tuple[str, str, list[Panel]]]:
    loss = {"training": run.points("loss"), "validation": run.points("val_loss")}
    yield "loss", "Loss", [Panel("loss (nats per token)", loss)]
    for name, title, column in (
        ("learning_rate", "Learning rate", "lr"),
        ("gradient_norm", "Gradient norm", "grad_norm"),
        ("tokens_per_s", "Tokens/s", "tokens_per_s"),
    ):
        curve = {run.name: run.points(column)}
        panel = Panel(
            title.lower(), curve, smoothed=column != "lr", logarithmic=column == "grad_norm"
        )
        yield name, title, [panel]
    yield "memory", "Peak memory", [Panel("peak memory, GB", _memory(run))]
    health = read_table(run.run_dir / "selection.csv")
    gates = [_by_layer(health, f"gate_{branch}", f"mean gate, {branch}") for branch in BRANCHES]
    yield "gates", "Mean gates by layer, first (dark) to last", gates
    selection = [_by_layer(health, column, title) for column, title in _SELECTION.items()]
    yield "selection", "Block selection by layer, first (dark) to last", selection


def _memory(run: Summary) -> dict[str, Points]:
    """Return the peaks of each rank from heartbeats, else of rank 0 from metrics.csv."""
    curves: dict[str, Points] = {
        f"rank {history.rank}": (
            [float(step) for step, _ in history.memory] + [float(history.step)],
            [memory for _, memory in history.memory] + [history.memory[-1][1]],
        )
        for history in run.histories
        if history.memory
    }
    return curves or {"rank 0": run.points("memory_gb")}


def _by_layer(health: Table, column: str, title: str) -> Panel:
    curves: dict[str, tuple[list[float], list[float]]] = {}
    fraction = column not in ("distance", "selector_loss")
    for row in health.rows:
        if "layer" in row and math.isfinite(row.get(column, math.nan)):
            steps, values = curves.setdefault(f"layer {row['layer']:.0f}", ([], []))
            steps.append(row["step"])
            values.append(row[column])
    return Panel(title, curves, ordered=True, fraction=fraction)
