"""Build the observers of a run: trackers, CSV files, progress, report."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nsa.engine.run_request import RunRequest
from nsa.monitor.csv_files import (
    FALLBACKS,
    METRICS,
    SELECTION,
    FallbacksCsv,
    MetricsCsv,
    SelectionCsv,
)
from nsa.monitor.history import RunHistory
from nsa.monitor.observer import Observer, Observers, warn
from nsa.monitor.progress import Progress
from nsa.monitor.tensorboard import BackgroundMonitor, TrackerObserver
from nsa.monitor.writer import BackgroundWriter
from nsa.ops import fallback_counts
from nsa.report.report import Reporter, write_report


def trackers(request: RunRequest) -> dict[str, Any]:
    """Return DeepSpeed's tracker blocks; set WANDB_* and COMET_*: the run's name and folder."""
    run_dir = request.run_dir.resolve()
    os.environ.setdefault("WANDB_NAME", run_dir.name)  # no key of DeepSpeed's sets these
    os.environ.setdefault("WANDB_DIR", str(run_dir))
    os.environ.setdefault("COMET_OFFLINE_DIRECTORY", str(run_dir))
    defaults: dict[str, dict[str, Any]] = {
        "comet": {"experiment_name": run_dir.name, "samples_log_interval": 1},
        "csv_monitor": {"output_path": str(run_dir), "job_name": "csv_monitor"},
    }
    given = request.ds_config
    blocks = {name: block | given[name] for name, block in defaults.items() if name in given}
    if request.config.monitor.tensorboard:
        folder = str(request.run_dir / "tensorboard")
        blocks["tensorboard"] = {"enabled": True, "output_path": folder, "job_name": ""}
    return blocks


def build_observers(
    request: RunRequest, engine: Any, run_history: RunHistory
) -> tuple[list[BackgroundWriter], Observer]:
    """Return the background writers and the observers that use them; none except on rank 0."""
    if dist.get_rank() != 0:
        return [], Observers([])
    monitor = request.config.monitor
    selector_loss = request.config.model.attention.selector_loss > 0
    writers: list[BackgroundWriter] = []
    observers: list[Observer] = [run_history]

    def writer(name: str) -> BackgroundWriter:
        writers.append(BackgroundWriter(name))
        return writers[-1]

    if engine.monitor.enabled:
        engine.monitor = BackgroundMonitor(
            engine.monitor, writer("trackers"), step=lambda: engine.global_steps
        )
        config = asdict(request.config)
        hparams = {name: config[name] for name in ("model", "data", "train")}
        hparams["deepspeed.stage"] = request.zero_stage
        observers.append(TrackerObserver(engine.monitor, hparams, request.config_files()))
    if monitor.csv:
        observers.append(MetricsCsv(writer(METRICS)))
    if monitor.health:
        observers.append(SelectionCsv(writer(SELECTION), selector_loss))
    observers.append(FallbacksCsv(writer(FALLBACKS), fallback_counts))
    if monitor.progress:
        observers.append(Progress(writer("progress")))
    if monitor.report:
        observers.append(Reporter(writer("report")))
    return writers, Observers(observers)


def write_final_report(run_dir: Path) -> None:
    """Write report.md after all other files; warn if that fails."""
    try:
        write_report(run_dir)
    except Exception as error:
        warn(f"report.md not written: {error!r}")
