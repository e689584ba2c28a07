"""Saving an engine and finding what was saved: `checkpoints/step00005000/` and `latest`.

DeepSpeed writes its own `latest` before the other ranks are done, so that it can name a folder
with a shard missing; here `latest` is written last, in one move.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

LATEST = "latest"


def save(engine: Any, folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the engine's shards and `state` (rank 0's is kept); every rank must call it."""
    tag = f"step{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        draft = folder / f".{LATEST}"
        with draft.open("w") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / LATEST)
    dist.barrier()
    return folder / tag


def newest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names; None where nothing was saved."""
    try:
        path = folder / (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if not path.is_dir():
        raise ValueError(f"{folder / LATEST} names {path.name}, which is not there; name another")
    return path


def load(engine: Any, checkpoint: Path) -> dict[str, Any]:
    """Restore weights and optimizer of every rank; returns the state saved with them."""
    path, state = engine.load_checkpoint(
        str(checkpoint.parent), tag=checkpoint.name, load_lr_scheduler_states=False
    )
    if path is None:
        raise ValueError(f"{checkpoint} could not be loaded by DeepSpeed; see its warning above")
    return state
