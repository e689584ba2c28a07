"""RankTelemetry: one rank's heartbeat, memory snapshots and traces; no collectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa.engine.process_group import Ranks
from nsa.engine.run_request import RunRequest
from nsa.engine.train_state import TrainState
from nsa.gates.ladder import ladder
from nsa.monitor.dtypes import DtypeReport
from nsa.monitor.heartbeat import Heartbeat
from nsa.monitor.history import HistoryRecorder, RunHistory
from nsa.monitor.memory import MemorySnapshots
from nsa.monitor.profile import StepProfiler
from nsa.monitor.stacks import dump_stacks_on_signal


class RankTelemetry:
    """Writes heartbeats from its creation on, everything else at each step."""

    def __init__(self, request: RunRequest, ranks: Ranks, state: TrainState) -> None:
        run_dir, rank, monitor = request.run_dir, ranks.rank, request.config.monitor
        dump_stacks_on_signal(run_dir, rank)
        gates = ladder(monitor.ladder, request.config.train.steps)
        windows = [(gate.since, gate.step) for gate in gates]
        self.history = HistoryRecorder(run_dir, rank, windows)
        self.run_history = RunHistory()  # used by rank 0
        self.heartbeat = Heartbeat(
            run_dir,
            rank=rank,
            backend=f"deepspeed-zero{request.zero_stage}",
            seconds=monitor.heartbeat,
            step=state.step,
            tokens=state.tokens,
            skipped=state.skipped,
            history=self.history,
        )
        self.memory = MemorySnapshots(run_dir, rank, monitor.memory_every)
        self.profiler = StepProfiler(run_dir, rank, request.profile_steps)
        self._write_dtypes: Callable[[], None] | None = None

    def report_dtypes(self, engine: Any, path: Path) -> None:
        """Record the dtypes of the next step and write them to `path` after it."""
        report = DtypeReport(engine.module)
        self._write_dtypes = lambda: report.write(path, engine.optimizer)

    def step_start(self, step: int) -> None:
        """Record the start of `step`, counted from 1."""
        self.heartbeat.step_start(step)
        self.memory.before(step)
        self.profiler.step_start(step)

    def enter(self, phase: str, micro_step: int = 0) -> None:
        """Record that this rank enters another phase of a step."""
        self.heartbeat.enter(phase, micro_step)

    def step_end(self, state: TrainState) -> None:
        """Record the end of a step, which `state` already counts."""
        self.profiler.step_end(state.step)
        self.memory.after(state.step)
        self.heartbeat.step_end(state.step, state.tokens, state.skipped)
        self.heartbeat.enter("idle")
        if self._write_dtypes is not None:
            self._write_dtypes()
            self._write_dtypes = None

    def close(self, status: str) -> None:
        """Record the end of the run with `status`."""
        self.profiler.close()
        self.memory.close()
        self.heartbeat.close(status)
