"""Results of `nsa tasks`: tasks.json, a table and two plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from nsa.atomic_io import row_json
from nsa.evaluate.tasks.evaluate import FACT_COUNTS, Rows
from nsa.report.markdown import table
from nsa.report.paired import margin
from nsa.report.plots import Panel, draw


def by_model(result: Mapping[str, Any]) -> dict[str, Rows]:
    rows: dict[str, Rows] = {}
    for row in result["rows"]:
        rows.setdefault(row["model"], []).append(row)
    return rows


def far_needles(row: Mapping[str, Any], seq_len: int, reach: int) -> float | None:
    """Return the accuracy on needles beyond the windows' reach, at one length."""
    far = [c["right"] for c in row["needle"] if c["seq_len"] == seq_len and c["distance"] > reach]
    return statistics.fmean(far) if far else None


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of accuracies beyond the windows' reach.

    Each is the mean over seeds ± half its 95% confidence interval, and the least.
    """
    longest, reach = result["seq_len"], result["reach"]
    has_needles = any(row["needle"] for row in result["rows"])
    facts = [f"{facts} facts" for facts in FACT_COUNTS]
    header = ["model", *facts, f"{facts[-1]}, {2 * longest:,} tokens"]
    header += [f"needles of {longest:,} tokens"] * has_needles + ["parameters", "seconds"]
    cells = []
    for name, rows in by_model(result).items():
        far = [[row["by_facts"][index]["far"] for row in rows] for index in range(len(FACT_COUNTS))]
        seconds = statistics.fmean(row["seconds"] for row in rows)
        far.append([row["twice_as_long"] for row in rows])
        if has_needles:
            far.append([far_needles(row, longest, reach) or 0.0 for row in rows])
        cells.append([name, *map(_accuracy, far), f"{rows[0]['parameters']:,}", f"{seconds:.0f}"])
    return table(header, cells)


def _accuracy(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1%}"
    return f"{mean} ± {100 * margin(values):.1f}, least {min(values):.1%}" if values[1:] else mean


def summary_json(result: Mapping[str, Any]) -> str:
    """Return tasks.json: results of each model and seed, one row per line.

    Needle accuracies are averaged at each length: over all depths, and beyond the reach.
    """
    rows = []
    for row in result["rows"]:
        needles = [
            {
                "seq_len": length,
                "all": statistics.fmean(cell["right"] for cell in cells),
                "far": far_needles(row, length, result["reach"]),
            }
            for length, cells in groupby(row["needle"], itemgetter("seq_len"))
        ]
        text = json.dumps({**row, "needle": needles})
        rows.append(json.loads(text, parse_float=lambda number: round(float(number), 4)))
    return row_json({**result, "rows": rows})


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
    panel = partial(Panel, marked=True, x_doubles=True, fraction=True)
    far = panel("accuracy beyond the reach of windows", by_facts, x="facts")
    draw([panel("accuracy", by_distance, x="positions back to the fact, from"), far], out)


def draw_needle(result: Mapping[str, Any], out: Path) -> None:
    """Plot accuracy over the needle's depth: a panel for each model; means of seeds."""
    panels = []
    for name, rows in by_model(result).items():
        curves = {}
        for length in sorted({cell["seq_len"] for cell in rows[0]["needle"]}):
            depths = _means(
                (cell["depth"], cell["right"])
                for row in rows
                for cell in row["needle"]
                if cell["seq_len"] == length
            )
            curves[f"{length:,} tokens"] = (list(depths), list(depths.values()))
        panels.append(Panel(name, curves, x="depth of the needle", marked=True, fraction=True))
    draw(panels, out)


def _means(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    values: dict[Any, list[float]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return {key: statistics.fmean(values[key]) for key in sorted(values)}
