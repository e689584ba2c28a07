"""Checkpoints of a DeepSpeed engine: save, verify, load, prune, convert."""

from __future__ import annotations

from nsa.checkpoint.engine_state import load
from nsa.checkpoint.manifest import (
    newest_complete,
    read_manifest,
    read_rank_state,
    read_state_file,
)
from nsa.checkpoint.saver import CheckpointConfig, SaveFailed, Saver
from nsa.checkpoint.universal import needs_universal, to_universal

__all__ = [
    "CheckpointConfig",
    "SaveFailed",
    "Saver",
    "load",
    "needs_universal",
    "newest_complete",
    "read_manifest",
    "read_rank_state",
    "read_state_file",
    "to_universal",
]
