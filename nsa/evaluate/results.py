"""What `nsa eval` found: a table to read, JSON and CSV to go on with, and a picture."""

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
from nsa.evaluate.perplexity import Judged, Mean
from nsa.evaluate.text import Text
from nsa.monitor.artifacts import number
from nsa.report.compare import table
from nsa.report.plots import Panel, draw

FIGURES, POSITIONS, PICTURE = "eval.json", "positions.csv", "positions.png"
_HEADER = ("run", "step", "seq-len", "tokens", "loss", "±", "perplexity", "bits/byte", "loss over")


@dataclass(frozen=True)
class Result:
    """One run, judged at one length."""

    run: str  # as tables call it
    place: Path
    step: int | None
    trained_len: int  # data.seq_len of its training
    seq_len: int
    stride: int
    text: Text  # in the run's tokens
    judged: Judged

    @property
    def bits_per_byte(self) -> float:
        return self.judged.loss.value / math.log(2) / self.text.samples.bytes_per_token

    @property
    def perplexity(self) -> float:
        loss = self.judged.loss.value
        return math.exp(loss) if loss < 700 else math.inf

    def beside(self, results: Sequence[Result]) -> Result | None:
        """What it is compared with: the first run at this length, or that run's first length.

        None for the very first, and where a run's tokens are others.
        """
        first = next(other for other in results if other.seq_len == self.seq_len)
        other = results[0] if first is self else first
        return other if other is not self and other.text is self.text else None


def lines(results: Sequence[Result]) -> list[str]:
    """A row for each result, and below it their losses by position."""
    return [
        *table([_HEADER, *(_row(result, results) for result in results)]),
        "",
        *table([("loss by position", *map(_label, results), ""), *_by_position(results)]),
    ]


def _row(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    loss, over = result.judged.loss, "-"
    other = result.beside(results)
    if other is not None:
        more = result.judged.less(other.judged)
        over = f"{_label(other)}: {more.value:+.4f}{_error(more)}"
    return (
        result.run,
        "-" if result.step is None else f"{result.step:,}",
        f"{result.seq_len:,}",
        f"{result.judged.tokens:,}",
        f"{loss.value:.4f}",
        "-" if loss.error is None else f"{loss.error:.4f}",
        f"{result.perplexity:,.3f}",
        f"{result.bits_per_byte:.4f}",
        over,
    )


def _error(mean: Mean) -> str:
    return "" if mean.error is None else f" ± {mean.error:.4f}"


def _label(result: Result) -> str:
    return f"{result.run}, {result.seq_len:,}"


def _by_position(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row for each bucket, a column for each result."""
    cells: dict[range, dict[str, str]] = {}
    for result in results:
        for positions, _, mean in result.judged.buckets():
            cells.setdefault(positions, {})[_label(result)] = f"{mean.value:.3f}{_error(mean)}"
    return [
        (
            f"{positions.start:,} to {positions.stop - 1:,}",
            *(found.get(_label(result), "-") for result in results),
            "",
        )
        for positions, found in sorted(cells.items(), key=lambda item: (item[0][0], item[0][-1]))
    ]


def new_folder(out: Path) -> None:
    """Make the folder of --out where there is none; what cannot be one is refused."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"--out {out}: no folder can be made there ({reason}); name another"
        ) from None


def write(results: Sequence[Result], text: dict[str, Any], out: Path) -> list[Path]:
    """Write what was found into the folder `out`; `text` says what was read."""
    figures = {"text": text, "results": [_figures(result, results) for result in results]}
    atomic_write_text(out / FIGURES, json.dumps(figures, indent=2) + "\n")
    atomic_write_text(out / POSITIONS, _csv(results))
    draw([_panel(results)], out / PICTURE, width=8.0)
    return [out / name for name in (FIGURES, POSITIONS, PICTURE)]


def _figures(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    other = result.beside(results)
    over = None
    if other is not None:
        more = _mean(result.judged.less(other.judged))
        over = {"run": other.run, "seq_len": other.seq_len, **more}
    return {
        "run": result.run,
        "place": str(result.place),
        "step": result.step,
        "trained_seq_len": result.trained_len,
        "seq_len": result.seq_len,
        "stride": result.stride,
        "tokens": result.judged.tokens,
        "samples": len(result.judged.losses),
        **_mean(result.judged.loss),
        "perplexity": number(result.perplexity),
        "bits_per_byte": number(result.bits_per_byte),
        "bytes_per_token": result.text.samples.bytes_per_token,
        "over": over,
        "positions": [
            {"first": at.start, "last": at.stop - 1, "tokens": tokens, **_mean(mean)}
            for at, tokens, mean in result.judged.buckets()
        ],
    }


def _mean(mean: Mean) -> dict[str, float | None]:
    return {"loss": number(mean.value), "standard_error": number(mean.error)}


def _csv(results: Sequence[Result]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["run", "seq_len", "first", "last", "tokens", "loss", "standard_error"])
    for result in results:
        for at, tokens, mean in result.judged.buckets():
            place = [result.run, result.seq_len, at.start, at.stop - 1, tokens]
            rows.writerow([*place, mean.value, mean.error])
    return text.getvalue()


def _panel(results: Sequence[Result]) -> Panel:
    """Each bucket at the middle of its positions, of which the first is 1 here."""
    curves, errors = {}, {}
    for result in results:
        found = result.judged.buckets()
        middles = [math.sqrt((at.start + 1) * at.stop) for at, _, _ in found]
        curves[_label(result)] = (middles, [mean.value for _, _, mean in found])
        errors[_label(result)] = [mean.error or 0.0 for _, _, mean in found]
    x = "tokens of context"
    return Panel("loss (nats per token)", curves, marked=True, x=x, x_doubles=True, errors=errors)
