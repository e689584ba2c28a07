"""Which checkpoint a run goes on from, agreed on by all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nsa import checkpoint
from nsa.checkpoint.state_file import LAYOUT_OF_STAGE, check_loadable
from nsa.checkpoint.weights import find_weights
from nsa.engine.config import RunConfig
from nsa.engine.process_group import Ranks
from nsa.engine.recipe import Plan
from nsa.engine.train_state import TrainState

Place = tuple[str, int]  # host and pid of a rank


def checkpoint_to_load(plan: Plan, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and what there is to say; what cannot be loaded is refused."""
    if not plan.resume:
        return None, []
    found, notes = checkpoint.newest_complete(plan.run_dir / "checkpoints")
    if found is None:
        return None, [*notes, "--resume: this run had saved no checkpoint; it starts at step 0"]
    saved = dict(checkpoint.read_topology(found))
    asked = {
        "layout": LAYOUT_OF_STAGE[plan.ds_config["zero_optimization"]["stage"]],
        "precision": plan.config.train.precision,
        "ranks": saved["ranks"] if plan.universal else ranks.world_size,
    }
    check_loadable(found, saved, asked)
    if notes:
        notes = [*(f"passed over: {note}" for note in notes), f"going on from {found.name}"]
    if saved["ranks"] != ranks.world_size:
        train = plan.config.train
        each = train.micro_batch * train.accumulation // train.sequence_parallel
        notes.append(
            f"{ranks.world_size} ranks instead of {saved['ranks']}: a step now has "
            f"{each * ranks.world_size} sequences, and had {each * saved['ranks']} with these "
            "settings; train.accumulation evens that out"
        )
    return found, notes


def saved_in(found: Path, rank: int, world_size: int) -> tuple[TrainState, dict[str, Any]]:
    """The training state of a checkpoint, and this rank's own: none of one among fewer or more."""
    own = {}
    if checkpoint.read_topology(found)["ranks"] == world_size:
        own = checkpoint.read_rank_state(found, rank) or {}
    return TrainState.from_dict(checkpoint.read_train_state(found)), own


def weights_to_load(config: RunConfig) -> Path | None:
    """The folder that a new run takes its weights from; where there is none it is refused."""
    if config.train.start_from is None:
        return None
    try:
        return find_weights(Path(config.train.start_from))
    except ValueError as error:
        raise ValueError(
            f"train.start_from = {error}; or set train.start_from=null to begin with random weights"
        ) from None


def agree_on(run_dir: Path, found: Path | None) -> tuple[Path, list[Place]]:
    """Rank 0's folder, and where the ranks are; all must go on from the same checkpoint.

    The other ranks may have chosen a folder after rank 0 had made its own.
    """
    mine = (run_dir, found, (os.uname().nodename, os.getpid()))
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, (_, other, _) in enumerate(everyone):
        if other != everyone[0][1]:
            raise ValueError(
                f"rank 0 found {everyone[0][1]} to go on from, and rank {rank} {other}: they must "
                "see the same files; put --run-dir on a disk that all of them share"
            )
    return everyone[0][0], [place for _, _, place in everyone]


def convert(found: Path, plan: Plan, ranks: Ranks) -> Path:
    """With --universal: the checkpoint in a form that any number of ranks can load."""
    if not plan.universal or not checkpoint.needs_universal(found, ranks.world_size):
        return found
    ways: list[tuple[Path | None, str]] = [(None, "")]
    if ranks.rank == 0:
        try:
            ways = [(checkpoint.to_universal(found), "")]
        except ValueError as error:
            ways = [(None, str(error))]
    dist.broadcast_object_list(ways)
    path, refusal = ways[0]
    if path is None:
        raise ValueError(refusal)
    return path
