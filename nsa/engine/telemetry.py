"""What each rank writes about itself while it trains; none of it is asked for by the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.engine.train_state import TrainState
from nsa.monitor.dtypes import DtypeReport
from nsa.monitor.heartbeat import Heartbeat
from nsa.monitor.memory import MemorySnapshots
from nsa.monitor.profile import StepProfiler


@dataclass
class RankTelemetry:
    """One rank's heartbeat, memory snapshots and traces, told of a step together."""

    heartbeat: Heartbeat
    memory: MemorySnapshots
    profiler: StepProfiler
    dtypes: tuple[DtypeReport, Any, Path] | None = (
        None  # with the optimizer, until one step is done
    )

    def listen(self, engine: Any, run_dir: Path, rank: int) -> None:
        """Have rank 0 write down the dtypes of the first step that is taken."""
        if rank == 0:
            self.dtypes = DtypeReport(engine.module), engine.optimizer, run_dir / "dtypes.txt"

    def step_start(self, step: int) -> None:
        """Step number `step`, from 1, is about to be taken."""
        self.heartbeat.step_start(step)
        self.memory.before(step)
        self.profiler.step_start(step)

    def enter(self, phase: str, micro_step: int = 0) -> None:
        """The rank goes over to another kind of work."""
        self.heartbeat.enter(phase, micro_step)

    def step_end(self, state: TrainState) -> None:
        """`state` is the one behind the step."""
        self.profiler.step_end(state.step)
        self.memory.after(state.step)
        self.heartbeat.step_end(state.step, state.tokens, state.skipped)
        self.heartbeat.enter("idle")
        if self.dtypes is not None:
            (dtypes, optimizer, path), self.dtypes = self.dtypes, None
            dtypes.write(path, optimizer)

    def close(self, status: str) -> None:
        """The run has ended, `status` says how."""
        self.profiler.close()
        self.memory.close()
        self.heartbeat.close(status)
