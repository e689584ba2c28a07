"""Resume: find the checkpoint or initial weights of a run, read its state, agree on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nsa import checkpoint
from nsa.checkpoint.state_file import LAYOUT_OF_STAGE, check_loadable
from nsa.checkpoint.weights import find_weights
from nsa.engine.config import RunConfig
from nsa.engine.consensus import Consensus
from nsa.engine.peer_hosts import RankProcess
from nsa.engine.process_group import Ranks
from nsa.engine.run_request import RunRequest
from nsa.engine.train_state import TrainState


def find_checkpoint(request: RunRequest, world_size: int) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint to resume from, and notes; refuse one that cannot load."""
    if not request.resume:
        return None, []
    path, notes = checkpoint.newest_complete(request.run_dir / "checkpoints")
    if path is None:
        return None, [*notes, "--resume: no checkpoint was saved; starting at step 0"]
    saved = dict(checkpoint.read_topology(path))
    wanted = {
        "layout": LAYOUT_OF_STAGE[request.zero_stage],
        "precision": request.config.train.precision,
        "ranks": saved["ranks"] if request.universal else world_size,
    }
    check_loadable(path, saved, wanted)
    if notes:  # newer checkpoints are damaged
        notes = [*(f"skipped: {note}" for note in notes), f"resuming from {path.name}"]
    if saved["ranks"] != world_size:
        train = request.config.train
        per_rank = train.micro_batch * train.accumulation // train.sequence_parallel
        notes.append(
            f"{world_size} ranks instead of {saved['ranks']}: a step has {per_rank * world_size} "
            f"sequences instead of {per_rank * saved['ranks']}; train.accumulation can restore that"
        )
    return path, notes


def read_state(path: Path, ranks: Ranks) -> tuple[TrainState, dict[str, Any]]:
    """Return a checkpoint's TrainState and this rank's state, {} if the world size differs."""
    rank_state = None
    if checkpoint.read_topology(path)["ranks"] == ranks.world_size:
        rank_state = checkpoint.read_rank_state(path, ranks.rank)
    return TrainState(**checkpoint.read_train_state(path)), rank_state or {}


def find_initial_weights(config: RunConfig) -> Path | None:
    """Return the folder that train.start_from names, or its newest checkpoint."""
    if config.train.start_from is None:
        return None
    try:
        return find_weights(Path(config.train.start_from))
    except ValueError as error:
        raise ValueError(
            f"train.start_from = {error}; or set train.start_from=null for random weights"
        ) from None


def agree_on_run(
    consensus: Consensus, run_dir: Path, path: Path | None
) -> tuple[Path, list[RankProcess]]:
    """Return rank 0's run folder and every rank's process; refuse different checkpoints.

    Without --run-dir, a rank that sees rank 0's new folder chooses the next free one.
    """
    process = RankProcess(os.uname().nodename, os.getpid())
    everyone = consensus.gather((run_dir, path, process))
    folder, expected, _ = everyone[0]
    for rank, (_, found, _) in enumerate(everyone):
        if found != expected:
            raise ValueError(
                f"--resume: rank 0 found checkpoint {expected} and rank {rank} found {found}; put "
                "--run-dir on a file system that all ranks share"
            )
    return folder, [process for _, _, process in everyone]


def convert_to_universal(consensus: Consensus, path: Path, ranks: Ranks) -> Path:
    """Return the form of a checkpoint that this number of ranks can load; rank 0 converts it."""
    if not checkpoint.needs_universal(path, ranks.world_size):
        return path
    error = None
    if ranks.rank == 0:
        try:
            path = checkpoint.to_universal(path)
        except ValueError as raised:
            error = raised
    consensus.raise_together(error)
    return consensus.broadcast(path)
