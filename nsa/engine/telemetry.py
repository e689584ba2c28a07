"""Telemetry: heartbeat, memory and traces of each rank, and rank 0's observers.

Observers write trackers, CSV files and progress. Telemetry uses no collectives.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from nsa.engine.process_group import Ranks
from nsa.engine.run_request import RunRequest, TrainState
from nsa.monitor.artifacts import RankHistory, read_rank
from nsa.monitor.config import HEARTBEAT_SECONDS
from nsa.monitor.heartbeat import Heartbeat, dump_stacks_on_signal
from nsa.monitor.memory import MemorySnapshots
from nsa.monitor.observer import BackgroundWriter, Observer, Observers
from nsa.monitor.outputs import (
    FallbacksCsv,
    Progress,
    TrackerObserver,
    metrics_csv,
    selection_csv,
    teacher_csv,
)
from nsa.monitor.throughput import StepProfiler
from nsa.ops import fallback_counts


class Telemetry:
    """Writes heartbeats in the background, and the rest at each step."""

    def __init__(self, request: RunRequest, ranks: Ranks, state: TrainState) -> None:
        run_dir, rank, monitor = request.run_dir, ranks.rank, request.config.monitor
        self._run_dir, self._rank = run_dir, rank
        dump_stacks_on_signal(run_dir, rank)
        self.csv_files = BackgroundWriter("CSV files") if rank == 0 else None
        self.heartbeat = Heartbeat(
            run_dir,
            rank=rank,
            backend=f"deepspeed-zero{request.zero_stage}",
            seconds=HEARTBEAT_SECONDS,
            step=state.step,
            tokens=state.tokens,
            skipped=state.skipped,
        )
        self.enter = self.heartbeat.enter  # call it at the start of each phase of a step
        self.memory = MemorySnapshots(run_dir, rank, monitor.memory_every)
        self.profiler = StepProfiler(run_dir, rank, request.profile_steps)

    def step_start(self, step: int) -> None:
        """Record the start of `step`, counted from 1."""
        self.heartbeat.step_start(step)
        self.memory.take(step, "before")
        self.profiler.step_start(step)

    def step_end(self, state: TrainState) -> None:
        """Record the end of step `state.step`."""
        self.profiler.step_end(state.step)
        self.memory.take(state.step, "after")
        self.heartbeat.step_end(state.step, state.tokens, state.skipped)
        self.heartbeat.enter("idle")

    def history(self) -> RankHistory:
        """Write this rank's pending lines, and return the content of its files."""
        if self.heartbeat.flush() and (self.csv_files is None or self.csv_files.flush()):
            return read_rank(self._run_dir, self._rank)
        return RankHistory(self._rank, problem="the disk did not take the newest lines")

    def close(self, status: str) -> None:
        self.profiler.close()
        self.memory.close()
        self.heartbeat.close(status)


def trackers(request: RunRequest) -> dict[str, Any]:
    """Return DeepSpeed's block for TensorBoard; set WANDB_* to the run's name and folder."""
    run_dir = request.run_dir.resolve()
    os.environ.setdefault("WANDB_NAME", run_dir.name)  # DeepSpeed has no keys for these
    os.environ.setdefault("WANDB_DIR", str(run_dir))
    if not request.config.monitor.tensorboard:
        return {}
    folder = str(request.run_dir / "tensorboard")
    return {"tensorboard": {"enabled": True, "output_path": folder, "job_name": ""}}


def build_observers(
    request: RunRequest, engine: Any, csv_files: BackgroundWriter | None
) -> Observers:
    """Return rank 0's observers; other ranks, where `csv_files` is None, have none."""
    if csv_files is None:
        return Observers([])
    monitor = request.config.monitor
    observers: list[tuple[Observer, BackgroundWriter]] = []
    if engine.monitor.enabled:
        config = asdict(request.config)
        hparams = {name: config[name] for name in ("model", "data", "train")}
        hparams["deepspeed.stage"] = request.zero_stage
        tracker = TrackerObserver(engine.monitor, hparams, request.config_files())
        observers.append((tracker, BackgroundWriter("trackers")))
        engine.monitor = SimpleNamespace(enabled=False)  # DeepSpeed would write within a step
    tables: list[Observer] = [FallbacksCsv(fallback_counts)]
    if monitor.csv:
        tables.append(metrics_csv())
    if monitor.health:
        tables.append(selection_csv(request.config.model.attention.selector_loss > 0))
    if request.config.train.teacher is not None:
        tables.append(teacher_csv())
    observers += [(table, csv_files) for table in tables]
    observers.append((Progress(request.stop_step), BackgroundWriter("progress")))
    return Observers(observers)
