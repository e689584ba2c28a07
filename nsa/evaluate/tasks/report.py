"""Results of `nsa tasks`: tasks.json, a table and two plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
        accuracies: dict[int, list[float]] = {}  # by length
        for cell in row["needle"]:
            accuracies.setdefault(cell["seq_len"], []).append(cell["right"])
        needles = [
            {
                "seq_len": length,
                "all": statistics.fmean(values),
                "far": far_needles(row, length, result["reach"]),
            }
            for length, values in accuracies.items()
        ]
        text = json.dumps({**row, "needle": needles})
        rounded = json.loads(text, parse_float=lambda number: round(float(number), 4))
        rows.append(f"  {json.dumps(rounded)}")
    fields = [f" {json.dumps(key)}: {json.dumps(result[key])}" for key in result if key != "rows"]
    return "{\n" + ",\n".join([*fields, ' "rows": [\n' + ",\n".join(rows) + "\n ]"]) + "\n}\n"


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
    common: dict[str, Any] = {"marked": True, "x_doubles": True, "fraction": True}
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
    columns = min(3, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(2.7 * columns + 0.9, 2.9 * lines), dpi=100, layout="constrained")
    axes = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for axis in axes[len(models) :]:
        axis.set_axis_off()
    for axis, (name, rows) in zip(axes, models.items(), strict=False):
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
    figure.supylabel("depth of the needle", fontsize="medium")
    figure.colorbar(image, ax=axes, label="accuracy")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _means(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    values: dict[Any, list[float]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return {key: statistics.fmean(values[key]) for key in sorted(values)}
