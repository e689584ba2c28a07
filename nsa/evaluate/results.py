"""Results of `nsa eval`: a table, eval.json and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.engine.load_run import StoredRun
from nsa.evaluate.perplexity import EvalData, Losses, Mean, perplexity
from nsa.monitor.artifacts import finite_number
from nsa.report.plots import Panel, draw
from nsa.text import align

JSON, PLOT = "eval.json", "positions.png"
FIGURES = {  # of the table, by key in eval.json: header and format
    "step": ("step", ","),
    "seq_len": ("seq-len", ","),
    "tokens": ("tokens", ","),
    "loss": ("loss", ".4f"),
    "standard_error": ("±", ".4f"),
    "perplexity": ("perplexity", ",.3f"),
    "bits_per_byte": ("bits/byte", ".4f"),
}
Row = dict[str, Any]  # of eval.json


@dataclass(frozen=True)
class Result:
    """One run, evaluated at one length."""

    name: str  # in tables
    run: StoredRun
    seq_len: int
    data: EvalData  # in the run's tokens
    losses: Losses

    def row(self, results: Sequence[Result]) -> Row:
        """Return this result's row of eval.json, with the difference to its baseline."""
        mean, bytes_per_token = self.losses.mean, self.data.samples.bytes_per_token
        over = None
        if (baseline := self._baseline(results)) is not None:
            difference = _to_json(self.losses.minus(baseline.losses))
            over = {"run": baseline.name, "seq_len": baseline.seq_len, **difference}
        return {
            "run": self.name,
            "place": str(self.run.folder),
            "step": self.run.step,
            "trained_seq_len": self.run.config.data.seq_len,
            "seq_len": self.seq_len,
            "tokens": self.losses.tokens,
            "samples": len(self.losses.sums),
            **_to_json(mean),
            "perplexity": finite_number(perplexity(mean.value)),
            "bits_per_byte": finite_number(mean.value / math.log(2) / bytes_per_token),
            "bytes_per_token": bytes_per_token,
            "over": over,
            "positions": [
                {"first": at.start, "last": at.stop - 1, "tokens": tokens, **_to_json(bucket)}
                for at, tokens, bucket in self.losses.buckets()
            ],
        }

    def _baseline(self, results: Sequence[Result]) -> Result | None:
        """Return the first run's result at this length; for the first run, at its shortest length.

        Return None for the baseline itself, and if the two results are of different tokens.
        """
        baseline = next(result for result in results if result.seq_len == self.seq_len)
        if baseline is self:
            baseline = results[0]
        if baseline is self or baseline.data is not self.data:
            return None
        return baseline


def _to_json(mean: Mean) -> Row:
    return {"loss": finite_number(mean.value), "standard_error": finite_number(mean.error)}


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the lines of two tables: the results, and their losses by position, counted from 1."""
    cells: dict[tuple[int, int], dict[str, str]] = {}
    for row in rows:
        for bucket in row["positions"]:
            positions = bucket["first"], bucket["last"]
            cells.setdefault(positions, {})[_label(row)] = _loss(bucket, ".3f")
    labels = [_label(row) for row in rows]
    by_position = [
        (f"{first + 1:,} to {last + 1:,}", *(losses.get(label, "-") for label in labels))
        for (first, last), losses in sorted(cells.items())
    ]
    by_result = []
    for row in rows:
        figures = [(row[key], form) for key, (_, form) in FIGURES.items()]
        formatted = ["-" if value is None else format(value, form) for value, form in figures]
        over = f"{_label(row['over'])}: {_loss(row['over'], '+.4f')}" if row["over"] else "-"
        by_result.append((row["run"], *formatted, over))
    header = ("run", *(title for title, _ in FIGURES.values()), "loss minus that of")
    # `align` sets a table's last column to the left, so an empty one follows the losses.
    table = [(*row, "") for row in [("loss by position", *labels), *by_position]]
    return [*align([header, *by_result]), "", *align(table)]


def _label(row: Row) -> str:
    return f"{row['run']}, {row['seq_len']:,}"


def _loss(row: Row, format_spec: str) -> str:
    """Return the loss and its standard error; a dash if there is none."""
    if row["loss"] is None:
        return "-"
    error = row["standard_error"]
    return f"{row['loss']:{format_spec}}" + ("" if error is None else f" ± {error:.4f}")


def write(rows: Sequence[Row], source: dict[str, Any], out: Path) -> list[Path]:
    """Write JSON and plot into the folder `out`; `source` describes the data."""
    atomic_write_text(out / JSON, json.dumps({"text": source, "results": rows}, indent=2) + "\n")
    draw([_panel(rows)], out / PLOT, width=8.0)
    return [out / name for name in (JSON, PLOT)]


def _panel(rows: Sequence[Row]) -> Panel:
    """Plot each bucket at the geometric middle of its positions, counted from 1."""
    curves, errors = {}, {}
    for row in rows:
        buckets = row["positions"]
        middles = [math.sqrt((at["first"] + 1) * (at["last"] + 1)) for at in buckets]
        losses = [math.nan if at["loss"] is None else at["loss"] for at in buckets]
        curves[_label(row)] = (middles, losses)
        errors[_label(row)] = [at["standard_error"] or 0.0 for at in buckets]
    x = "tokens of context"
    return Panel("loss (nats per token)", curves, marked=True, x=x, x_doubles=True, errors=errors)
