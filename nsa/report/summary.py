"""Summary of a run: its main figures, from the readable files of its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from nsa.gates.results import GateResult, read_results
from nsa.monitor.artifacts import Table, list_ranks, read_table, try_read_text
from nsa.monitor.history import RankHistory, read_rank
from nsa.report.plots import Panel
from nsa.untrusted import parse_yaml

_PANELS = (
    ("loss", "training loss (nats per token)"),
    ("bits_per_byte", "validation bits per byte"),
    ("tokens_per_s", "tokens/s, all ranks"),
    ("grad_norm", "gradient norm"),
    ("lr", "learning rate"),
    ("memory_gb", "peak memory of rank 0, GB"),
)


@dataclass
class Summary:
    """Contents of a run's files; a figure that was not recorded is None."""

    run_dir: Path
    metrics: Table
    histories: list[RankHistory]
    gates: list[GateResult]

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def steps(self) -> int:
        """The highest recorded step."""
        logged = [int(row["step"]) for row in self.metrics.rows[-1:]]
        return max([0, *logged, *(history.step for history in self.histories)])

    @property
    def tokens_per_step(self) -> int | None:
        rows = self.metrics.rows
        last = rows[-1] if rows else {}
        return (
            round(last["tokens"] / last["step"]) if last.get("step") and "tokens" in last else None
        )

    @cached_property
    def config(self) -> object:
        """The tree of config.yaml; None if it cannot be read."""
        try:
            return parse_yaml(try_read_text(self.run_dir / "config.yaml") or "")
        except ValueError:
            return None

    @property
    def tokens_per_s(self) -> float | None:
        """The median, without warm-up."""
        rates = self.points("tokens_per_s")[1]
        return median(rates) if rates else None

    @property
    def memory_gb(self) -> float | None:
        """The peak of any rank."""
        peaks = [memory for history in self.histories for _, memory in history.memory[-1:]]
        return max([*peaks, *self.points("memory_gb")[1]], default=None)

    @property
    def skipped(self) -> int | None:
        counts = [history.skipped for history in self.histories if history.skipped is not None]
        return max(counts, default=None)

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """Return the steps and the finite values of a column of metrics.csv."""
        rows = [row for row in self.metrics.rows if math.isfinite(row.get(column, math.nan))]
        return [row["step"] for row in rows], [row[column] for row in rows]

    def final(self, column: str, spec: str) -> str:
        """Return the last finite value, "2.6758 (step 50)" if not of the last step; "" if none."""
        steps, values = self.points(column)
        if not values:
            return ""
        step = "" if steps[-1] == self.steps else f" (step {steps[-1]:,.0f})"
        return f"{values[-1]:{spec}}{step}"

    def last(self, column: str) -> float | None:
        """Return the last finite value of a column."""
        values = self.points(column)[1]
        return values[-1] if values else None


def lookup(tree: object, name: str) -> object:
    """Return the value at a dotted name of a tree of settings; "" if there is none."""
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return ""
        tree = tree[part]
    return tree


def summarise(run_dir: Path) -> Summary:
    """Read the files of a run."""
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such folder; give a run folder, for example runs/m7c-demo")
    return Summary(
        run_dir=run_dir,
        metrics=read_table(run_dir / "metrics.csv"),
        histories=[read_rank(run_dir, rank) for rank in list_ranks(run_dir)],
        gates=read_results(run_dir),
    )


def curve_panels(runs: Mapping[str, Summary]) -> list[Panel]:
    """Return a panel for each recorded column of metrics.csv, with a curve for each run."""
    panels = []
    for column, title in _PANELS:
        curves = {label: run.points(column) for label, run in runs.items()}
        if any(steps for steps, _ in curves.values()):
            marked, logarithmic = column == "bits_per_byte", column == "grad_norm"
            panels.append(Panel(title, curves, marked=marked, logarithmic=logarithmic))
    return panels
