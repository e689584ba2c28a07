"""Save, find and load checkpoints of an engine that is handed in."""

from nsa.checkpoint.config import CheckpointConfig
from nsa.checkpoint.store import load, newest, save, saved_rank_state, saved_state

__all__ = ["CheckpointConfig", "load", "newest", "save", "saved_rank_state", "saved_state"]
