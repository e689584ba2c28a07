"""The few figures of a run that a reader asks for first, from whatever of its files can be read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from nsa.gates.result import GateResult, read_gates
from nsa.monitor.artifacts import Table, ranks, read_table
from nsa.monitor.history import RankHistory, read_rank


@dataclass
class Summary:
    """A run's folder, read once; None stands for what is not recorded in it."""

    run_dir: Path
    metrics: Table
    histories: list[RankHistory]
    verdicts: list[GateResult]

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def steps(self) -> int:
        """The highest step that anything was written of."""
        rows = self.metrics.rows
        return max(
            int(rows[-1]["step"]) if rows else 0, *(history.step for history in self.histories)
        )

    @property
    def tokens(self) -> float | None:
        return self._last("tokens")

    @property
    def first_loss(self) -> float | None:
        rows = self.metrics.rows
        return rows[0].get("loss") if rows and rows[0]["step"] == 1 else None

    @property
    def loss(self) -> float | None:
        return self._last("loss")

    @property
    def held_out(self) -> float | None:
        return self._last("val_loss")

    @property
    def bits_per_byte(self) -> float | None:
        return self._last("bits_per_byte")

    @property
    def tokens_per_s(self) -> float | None:
        """The median, without warm-up."""
        rates = self.points("tokens_per_s")[1]
        return median(rates) if rates else None

    @cached_property
    def memory_gb(self) -> float | None:
        """The peak of any rank."""
        peaks = [memory for history in self.histories for _, memory in history.memory[-1:]]
        return max([*peaks, *self.points("memory_gb")[1]], default=None)

    @property
    def skipped(self) -> int | None:
        """Steps that were not applied."""
        counts = [history.skipped for history in self.histories if history.skipped is not None]
        return max(counts, default=None)

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """Steps and the finite values of one column."""
        rows = [row for row in self.metrics.rows if math.isfinite(row.get(column, math.nan))]
        return [row["step"] for row in rows], [row[column] for row in rows]

    def _last(self, column: str) -> float | None:
        values = self.points(column)[1]
        return values[-1] if values else None


def summarise(run_dir: Path) -> Summary:
    """Read what there is of a run; a folder that isn't there is the caller's mistake."""
    if not run_dir.is_dir():
        raise ValueError(
            f"{run_dir}: there is no such folder; give that of a run, as runs/m7c-demo"
        )
    return Summary(
        run_dir=run_dir,
        metrics=read_table(run_dir / "metrics.csv"),
        histories=[read_rank(run_dir, rank) for rank in ranks(run_dir)],
        verdicts=read_gates(run_dir),
    )
