"""Who watches a run: made here, told by the loop."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nsa.engine.config import RunConfig
from nsa.engine.process_group import Ranks
from nsa.engine.recipe import Plan, run_files
from nsa.engine.telemetry import RankTelemetry
from nsa.engine.train_state import TrainState
from nsa.monitor.fallbacks import Fallbacks
from nsa.monitor.heartbeat import Heartbeat
from nsa.monitor.memory import MemorySnapshots
from nsa.monitor.metrics_csv import MetricsCsv
from nsa.monitor.observer import Observer, Observers, warn
from nsa.monitor.profile import StepProfiler
from nsa.monitor.progress import Progress
from nsa.monitor.selection_csv import SelectionCsv
from nsa.monitor.stacks import dump_stacks_on_signal
from nsa.monitor.tensorboard import BackgroundMonitor, TensorBoardObserver
from nsa.monitor.writer import BackgroundWriter
from nsa.ops import fallback_counts
from nsa.report.observer import Reporter


def start_telemetry(plan: Plan, ranks: Ranks, state: TrainState) -> RankTelemetry:
    """What each rank has of its own; its heart beats from here on."""
    monitor = plan.config.monitor
    backend = f"deepspeed-zero{plan.ds_config['zero_optimization']['stage']}"
    dump_stacks_on_signal(plan.run_dir, ranks.rank)
    return RankTelemetry(
        Heartbeat(
            plan.run_dir,
            rank=ranks.rank,
            backend=backend,
            seconds=monitor.heartbeat,
            step=state.step,
            tokens=state.tokens,
            skipped=state.skipped,
        ),
        MemorySnapshots(plan.run_dir, ranks.rank, monitor.memory_every),
        StepProfiler(plan.run_dir, ranks.rank, plan.profile_steps),
    )


def build_observers(plan: Plan, engine: Any) -> tuple[list[BackgroundWriter], Observer]:
    """The observers, each with a writer of its own; only rank 0 is ever told anything."""
    if dist.get_rank() != 0:
        return [], Observers([])
    monitor = plan.config.monitor
    writers: list[BackgroundWriter] = []
    observers: list[Observer] = []

    def writer(name: str) -> BackgroundWriter:
        writers.append(BackgroundWriter(name))
        return writers[-1]

    if monitor.tensorboard:
        engine.monitor = BackgroundMonitor(
            engine.monitor, writer("tensorboard"), step=lambda: engine.global_steps
        )
        observers.append(TensorBoardObserver(engine.monitor, _settings(plan), run_files(plan)))
    if monitor.csv:
        observers.append(MetricsCsv(writer("metrics.csv")))
    if monitor.health:
        observers.append(SelectionCsv(writer("selection.csv")))
    observers.append(Fallbacks(writer("fallbacks.csv"), fallback_counts))
    if monitor.progress:
        observers.append(Progress(writer("progress")))
    if monitor.report:
        observers.append(Reporter(writer("report")))
    return writers, Observers(observers)


def _settings(plan: Plan) -> dict[str, Any]:
    """What tells one run from another."""
    tree = asdict(plan.config)
    stage = plan.ds_config["zero_optimization"]["stage"]
    return {**{name: tree[name] for name in ("model", "data", "train")}, "deepspeed.stage": stage}


def report(config: RunConfig, run_dir: Path, rank: int) -> None:
    """The report of a run that has ended, once everything is written that it is made from."""
    if rank != 0 or not config.monitor.report:
        return
    try:
        from nsa.report.report import write_report  # late: it draws

        write_report(run_dir)
    except Exception as error:
        warn(f"the report was not written: {error!r}")
