"""Judge a gate from the files of a run, as a run that resumes at a gate does."""

from __future__ import annotations

from pathlib import Path

from nsa.gates.criteria import GateInputs, judge
from nsa.gates.results import GateResult
from nsa.gates.schedule import Gate, schedule
from nsa.monitor.artifacts import list_ranks
from nsa.monitor.config import LadderConfig
from nsa.monitor.history import HistoryRecorder, RunHistory


def gate_at(name: str, step: int) -> Gate:
    """The gate `name` moved to `step`, after the usual gates before it."""
    earlier = [gate.step for gate in schedule(LadderConfig(), step) if gate.step < step]
    return Gate(name, step, max(earlier, default=0))


def load_inputs(run_dir: Path, gate: Gate, log_every: int = 10) -> GateInputs:
    records = RunHistory()
    records.load(run_dir, gate.step)
    window = [(gate.previous_step, gate.step)]
    recorders = [HistoryRecorder(run_dir, rank, window) for rank in list_ranks(run_dir)]
    histories = [recorder.up_to(gate.step) for recorder in recorders]
    steps = gate.previous_step, gate.step
    return GateInputs(*steps, log_every, records.metrics, records.selection, histories)


def judge_files(run_dir: Path, gate: Gate, config: LadderConfig) -> GateResult:
    return judge(gate, load_inputs(run_dir, gate), config)
