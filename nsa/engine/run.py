"""Run: everything that the training loop works on, built and validated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.checkpoint import Saver
from nsa.engine.config import RunConfig
from nsa.engine.consensus import Consensus
from nsa.engine.data import Data
from nsa.engine.loss_guard import LossGuard
from nsa.engine.process_group import Ranks
from nsa.engine.shutdown import ShutdownMonitor
from nsa.engine.telemetry import RankTelemetry
from nsa.engine.train_state import TrainState
from nsa.gates.ladder import Gate
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import Observer
from nsa.monitor.throughput import Throughput


@dataclass
class Run:
    """One rank's parts and progress. Observers do nothing on ranks other than 0."""

    config: RunConfig
    engine: Any  # DeepSpeed's
    data: Data
    consensus: Consensus
    shutdown: ShutdownMonitor
    state: TrainState
    stop_step: int  # the LR schedule ends at config.train.steps
    gates: list[Gate]
    run_dir: Path
    ranks: Ranks
    device: torch.device
    saver: Saver
    guard: LossGuard
    telemetry: RankTelemetry
    observers: Observer
    health: HealthRecorder
    throughput: Throughput
    loader_state: dict[str, Any] | None = None  # of this rank, after the last step
    saved_step: int = 0  # of the newest checkpoint
    bad_steps: int = 0  # since launch
    validation_note_logged: bool = False
