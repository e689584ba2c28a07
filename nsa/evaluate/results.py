"""Results of `nsa eval`: a table, eval.json, positions.csv and a plot."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.evaluate.data import EvalData
from nsa.evaluate.perplexity import Losses, Mean
from nsa.monitor.artifacts import align, number
from nsa.report.plots import Panel, draw

JSON, CSV, PLOT = "eval.json", "positions.csv", "positions.png"
_HEADER = ("run", "step", "seq-len", "tokens", "loss", "±", "perplexity", "bits/byte", "loss over")


@dataclass(frozen=True)
class Result:
    """One run, evaluated at one length."""

    run: str  # its name in tables
    path: Path
    step: int | None
    trained_len: int  # data.seq_len in training
    seq_len: int
    stride: int
    data: EvalData  # in the run's tokens
    losses: Losses

    @property
    def bits_per_byte(self) -> float:
        return self.losses.mean.value / math.log(2) / self.data.samples.bytes_per_token

    @property
    def perplexity(self) -> float:
        loss = self.losses.mean.value
        return math.exp(loss) if loss < 700 else math.inf

    @property
    def label(self) -> str:
        return f"{self.run}, {self.seq_len:,}"

    def baseline(self, results: Sequence[Result]) -> Result | None:
        """Return the result to compare with: the first run's at this length, else the first of all.

        None for the first of all, or if the evaluated tokens differ.
        """
        first = next(other for other in results if other.seq_len == self.seq_len)
        other = results[0] if first is self else first
        return other if other is not self and other.data is self.data else None


def lines(results: Sequence[Result]) -> list[str]:
    """Return a table with a row for each result, and one of their losses by position."""
    cells: dict[range, dict[str, str]] = {}
    for result in results:
        for positions, _, mean in result.losses.buckets():
            cells.setdefault(positions, {})[result.label] = f"{mean.value:.3f}{_plus_minus(mean)}"
    by_position = [
        (
            f"{positions.start:,} to {positions.stop - 1:,}",
            *(row.get(result.label, "-") for result in results),
            "",
        )
        for positions, row in sorted(cells.items(), key=lambda item: (item[0][0], item[0][-1]))
    ]
    return [
        *align([_HEADER, *(_row(result, results) for result in results)]),
        "",
        *align([("loss by position", *(result.label for result in results), ""), *by_position]),
    ]


def _row(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    mean, over = result.losses.mean, "-"
    baseline = result.baseline(results)
    if baseline is not None:
        difference = result.losses.minus(baseline.losses)
        over = f"{baseline.label}: {difference.value:+.4f}{_plus_minus(difference)}"
    return (
        result.run,
        "-" if result.step is None else f"{result.step:,}",
        f"{result.seq_len:,}",
        f"{result.losses.tokens:,}",
        f"{mean.value:.4f}",
        "-" if mean.error is None else f"{mean.error:.4f}",
        f"{result.perplexity:,.3f}",
        f"{result.bits_per_byte:.4f}",
        over,
    )


def _plus_minus(mean: Mean) -> str:
    return "" if mean.error is None else f" ± {mean.error:.4f}"


def make_folder(out: Path) -> None:
    """Create the folder of --out; raise a ValueError if it cannot be created."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"--out {out}: the folder cannot be created ({reason}); name another"
        ) from None


def write(results: Sequence[Result], source: dict[str, Any], out: Path) -> list[Path]:
    """Write JSON, CSV and plot into the folder `out`; `source` describes the data."""
    content = {"text": source, "results": [_to_json(result, results) for result in results]}
    atomic_write_text(out / JSON, json.dumps(content, indent=2) + "\n")
    atomic_write_text(out / CSV, _to_csv(results))
    draw([_panel(results)], out / PLOT, width=8.0)
    return [out / name for name in (JSON, CSV, PLOT)]


def _to_json(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    baseline, over = result.baseline(results), None
    if baseline is not None:
        difference = _mean_to_json(result.losses.minus(baseline.losses))
        over = {"run": baseline.run, "seq_len": baseline.seq_len, **difference}
    return {
        "run": result.run,
        "place": str(result.path),
        "step": result.step,
        "trained_seq_len": result.trained_len,
        "seq_len": result.seq_len,
        "stride": result.stride,
        "tokens": result.losses.tokens,
        "samples": len(result.losses.sums),
        **_mean_to_json(result.losses.mean),
        "perplexity": number(result.perplexity),
        "bits_per_byte": number(result.bits_per_byte),
        "bytes_per_token": result.data.samples.bytes_per_token,
        "over": over,
        "positions": [
            {"first": at.start, "last": at.stop - 1, "tokens": tokens, **_mean_to_json(mean)}
            for at, tokens, mean in result.losses.buckets()
        ],
    }


def _mean_to_json(mean: Mean) -> dict[str, float | None]:
    return {"loss": number(mean.value), "standard_error": number(mean.error)}


def _to_csv(results: Sequence[Result]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["run", "seq_len", "first", "last", "tokens", "loss", "standard_error"])
    for result in results:
        for at, tokens, mean in result.losses.buckets():
            bucket = [result.run, result.seq_len, at.start, at.stop - 1, tokens]
            rows.writerow([*bucket, mean.value, mean.error])
    return text.getvalue()


def _panel(results: Sequence[Result]) -> Panel:
    """Plot each bucket at the geometric middle of its positions, counted from 1."""
    curves, errors = {}, {}
    for result in results:
        buckets = result.losses.buckets()
        middles = [math.sqrt((at.start + 1) * at.stop) for at, _, _ in buckets]
        curves[result.label] = (middles, [mean.value for _, _, mean in buckets])
        errors[result.label] = [mean.error or 0.0 for _, _, mean in buckets]
    x = "tokens of context"
    return Panel("loss (nats per token)", curves, marked=True, x=x, x_doubles=True, errors=errors)
