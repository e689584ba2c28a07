"""Checkpoints of a DeepSpeed engine: save, verify, load, prune, convert."""
