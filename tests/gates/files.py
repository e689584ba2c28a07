"""Judge a gate from the files of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa.gates.criteria import GateInputs, judge
from nsa.gates.results import Gate, GateResult
from nsa.monitor.artifacts import list_ranks, read_rank, read_table
from nsa.monitor.config import LadderConfig


def load_inputs(run_dir: Path, gate: Gate, **facts: Any) -> GateInputs:
    """Return what the run has recorded, and `facts` that its files do not hold."""
    return GateInputs(
        gate.step,
        log_every=10,
        metrics=read_table(run_dir / "metrics.csv"),
        selection=read_table(run_dir / "selection.csv"),
        histories=[read_rank(run_dir, rank) for rank in list_ranks(run_dir)],
        **facts,
    )


def judge_files(run_dir: Path, gate: Gate, config: LadderConfig, **facts: Any) -> GateResult:
    return judge(gate, load_inputs(run_dir, gate, **facts), config)
