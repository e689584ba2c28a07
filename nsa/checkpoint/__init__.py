"""Save, find and load checkpoints of an engine that is handed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from nsa.checkpoint.config import CheckpointConfig
from nsa.checkpoint.errors import SaveFailed
from nsa.checkpoint.manifest import name_of, newest_whole, read_manifest
from nsa.checkpoint.saver import Saver
from nsa.checkpoint.store import load, saved_rank_state, saved_state, saved_under
from nsa.checkpoint.universal import needs_universal, to_universal

__all__ = [
    "CheckpointConfig",
    "SaveFailed",
    "Saver",
    "load",
    "needs_universal",
    "newest_whole",
    "read_manifest",
    "save",
    "saved_rank_state",
    "saved_state",
    "saved_under",
    "to_universal",
]


def save(
    engine: Any,
    folder: Path,
    step: int,
    state: dict[str, Any],
    rank_state: dict[str, Any] | None = None,
) -> Path:
    """Save once and wait for it; every rank must call it with the same step."""

    def agree(error: ValueError | None) -> None:
        messages: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, error and str(error))
        if any(messages):
            raise ValueError("; ".join(filter(None, messages)))

    saver = Saver(engine, folder, CheckpointConfig(), agree=agree)
    saver.save(step, state, rank_state)
    saver.finish()
    return folder / name_of(step)
