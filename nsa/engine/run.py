"""Run: everything that one rank of a run works on; nsa/engine/trainer.py fills it in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nsa.checkpoint import Checkpoint, Saver
from nsa.doctor.node import Check
from nsa.engine.config import RunConfig
from nsa.engine.cpu_collectives import CpuCollectives
from nsa.engine.data import Data
from nsa.engine.load_run import StoredRun
from nsa.engine.loss_guard import LossGuard
from nsa.engine.process_group import Ranks
from nsa.engine.run_dir import FolderLock
from nsa.engine.run_request import RunRequest, TrainState
from nsa.engine.shutdown import ShutdownMonitor
from nsa.engine.teacher import Teacher
from nsa.engine.telemetry import Telemetry
from nsa.gates.results import Gate
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import Observers
from nsa.monitor.throughput import Throughput


class Run:
    """One rank's parts and progress."""

    # Set by prepare(), without a process group.
    resume_from: Checkpoint | None = None
    weights: Path | None = None  # initial weights of a fresh run
    stored_teacher: StoredRun | None = None
    state: TrainState
    node_checks: list[Check]  # empty except on local rank 0
    data: Data

    # Set by build().
    device: torch.device
    collectives: CpuCollectives
    processes: list[tuple[str, int]]  # host and process id of each rank
    telemetry: Telemetry
    engine: Any  # DeepSpeed's
    teacher: Teacher | None = None  # of train.teacher
    run_id: str | None = None  # in the manifests of its checkpoints; None except on rank 0
    observers: Observers  # none except on rank 0
    saver: Saver
    guard: LossGuard
    shutdown: ShutdownMonitor
    gates: list[Gate]
    health: HealthRecorder
    throughput: Throughput

    # Progress of the training loop.
    saved_step = 0  # of the newest checkpoint; 0: none
    validation_note_logged = False

    def __init__(self, request: RunRequest, lock: FolderLock | None) -> None:
        self.request = request
        self.lock = lock  # of the run's folder; None except on rank 0
        self.ranks = Ranks.from_environment()
        self.notes = list(request.notes)  # for the log

    @property
    def config(self) -> RunConfig:
        return self.request.config
