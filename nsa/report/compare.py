"""Runs beside each other: one picture of their curves, and a table of where they ended."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.report.summary import Summary

_PANELS = (
    ("loss", "training loss (nats per token)"),
    ("bits_per_byte", "held-out bits per byte"),
    ("tokens_per_s", "tokens/s, all ranks"),
    ("grad_norm", "gradient norm"),
)
_HEADER = ("run", "steps", "loss", "held-out", "bits/byte", "tokens/s", "GB", "gates")


def add_parser(verbs: Any) -> None:
    """Add `compare` to the verbs of `nsa`."""
    about = "draw the curves of runs into one picture, and print where each of them ended"
    compare = verbs.add_parser("compare", help=about, description=about)
    compare.add_argument("runs", type=Path, nargs="+", help="folders of runs, as runs/m7c-demo")
    compare.add_argument(
        "--out", type=Path, help="the picture (default: compare.png beside the first run)"
    )
    compare.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    out = args.out or args.runs[0].resolve().parent / "compare.png"
    for line in compare_runs(args.runs, out):
        print(line)
    print(out)
    return 0


def compare_runs(runs: Sequence[Path], out: Path) -> list[str]:
    """Draw the runs into `out`; returns the lines of a table."""
    from nsa.report.plots import Panel, draw
    from nsa.report.summary import summarise

    found = {label: summarise(run) for label, run in labelled(runs).items()}
    for run in found.values():
        if not run.metrics.rows:
            raise ValueError(
                f"{run.run_dir}: {run.metrics.problem}; give the folder of a run that has logged"
            )
    panels = []
    for column, title in _PANELS:
        curves = {label: run.points(column) for label, run in found.items()}
        if any(steps for steps, _ in curves.values()):
            panels.append(Panel(title, curves, marked=column == "bits_per_byte"))
    draw(panels, out)
    return table([_HEADER, *(_row(label, run) for label, run in found.items())])


def _row(label: str, run: Summary) -> tuple[str, ...]:
    gates = [f"{verdict.gate} {'Go' if verdict.go else 'No-Go'}" for verdict in run.verdicts[-1:]]
    return (
        label,
        f"{run.steps:,}",
        _shown(run.loss, ".3f"),
        _shown(run.held_out, ".3f"),
        _shown(run.bits_per_byte, ".3f"),
        _shown(run.tokens_per_s, ",.0f"),
        _shown(run.memory_gb, ".2f"),
        *(gates or ["-"]),
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            f"{cell:{'<' if at in (0, last) else '>'}{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def labelled(runs: Sequence[Path]) -> dict[str, Path]:
    """Each run once, by its folder's name; by its whole path where two are called the same."""
    names = [run.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run) for run in runs]
    return dict(zip(labels, runs, strict=True))
