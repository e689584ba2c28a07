"""Save one checkpoint of an engine, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa.checkpoint import CheckpointConfig, Saver
from nsa.engine.cpu_collectives import CpuCollectives


def save_once(
    engine: Any,
    folder: Path,
    step: int,
    state: dict[str, Any],
    rank_state: dict[str, Any] | None = None,
) -> None:
    """Save once; every rank must call it with the same step."""
    barrier = CpuCollectives(slowest=60).barrier
    saver = Saver(engine, folder, CheckpointConfig(), barrier=barrier)
    saver.save(step, state, rank_state)
