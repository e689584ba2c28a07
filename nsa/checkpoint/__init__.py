"""Checkpoints of a DeepSpeed engine: save, verify, load, prune, convert."""

from __future__ import annotations

from nsa.checkpoint.commit import newest_valid, read_manifest
from nsa.checkpoint.saver import CheckpointConfig, SaveFailed, Saver, load
from nsa.checkpoint.state_file import Checkpoint, read_state_file
from nsa.checkpoint.universal import needs_universal, to_universal

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "SaveFailed",
    "Saver",
    "load",
    "needs_universal",
    "newest_valid",
    "read_manifest",
    "read_state_file",
    "to_universal",
]
