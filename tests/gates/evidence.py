"""Evidence of a run read from its files, as a run that resumes at a gate reads it."""

from __future__ import annotations

from pathlib import Path

from nsa.gates.criteria import Evidence, judge
from nsa.gates.ladder import Gate, GateResult, ladder
from nsa.monitor.artifacts import ranks
from nsa.monitor.config import LadderConfig
from nsa.monitor.history import HistoryRecorder, RunHistory


def gate_at(name: str, step: int) -> Gate:
    """The gate `name` moved to `step`, after the usual gates before it."""
    earlier = [gate.step for gate in ladder(LadderConfig(), step) if gate.step < step]
    return Gate(name, step, max(earlier, default=0))


def load_evidence(run_dir: Path, gate: Gate, log_every: int = 10) -> Evidence:
    records = RunHistory()
    records.load(run_dir, gate.step)
    window = [(gate.since, gate.step)]
    histories = [
        HistoryRecorder(run_dir, rank, window).history(gate.step) for rank in ranks(run_dir)
    ]
    return Evidence(gate.since, gate.step, log_every, records.metrics, records.selection, histories)


def judge_files(run_dir: Path, gate: Gate, config: LadderConfig) -> GateResult:
    return judge(gate, load_evidence(run_dir, gate), config)
