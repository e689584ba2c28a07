"""Resume: find a run's checkpoint or initial weights, read its state, compare across ranks."""

from __future__ import annotations

import os
from pathlib import Path

from nsa.checkpoint.state_file import (
    Checkpoint,
    Topology,
    check_loadable,
    layout_of,
    read_state_file,
)
from nsa.checkpoint.universal import needs_universal, to_universal
from nsa.checkpoint.weights import find_weights
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, zero_mode
from nsa.engine.process_group import CpuCollectives, Ranks
from nsa.engine.run_request import RunRequest, TrainState
from nsa.untrusted import read_object, short_repr


def read_checkpoint(request: RunRequest, world_size: int) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to resume from, and notes; raise if it cannot be loaded."""
    path, notes = request.checkpoint, list[str]()
    if path is None:
        request.config.check_phases()  # a saved config is loaded without this check
        return None, notes
    saved = read_state_file(path)
    saved_ranks = saved.topology.ranks
    ranks = saved_ranks if request.universal else world_size  # --universal converts the checkpoint
    required = Topology(layout_of(request.zero_stage), request.config.train.precision, ranks)
    check_loadable(path, saved.topology, required)
    if (path / "ds_config.json").exists():  # a universal checkpoint has none
        stage = zero_mode(load_ds_config(path / "ds_config.json")).stage
        if stage != request.zero_stage:
            notes.append(f"changed since {path.name}: ZeRO stage: {stage} -> {request.zero_stage}")
    before = request.resumed_config
    if before is None:
        return saved, notes
    check_schedule(before, request.config, saved.step)
    check_groups(before, request.config)
    if isinstance(saved_ranks, int):  # not ANY_RANKS
        tokens = request.config.tokens_per_step(world_size)
        tokens_before = before.tokens_per_step(saved_ranks)
        if tokens != tokens_before:
            notes.append(
                f"a step has {tokens:,} tokens (world size {world_size}) instead of "
                f"{tokens_before:,} (world size {saved_ranks}); train.accumulation can restore that"
            )
    return saved, notes


def check_schedule(before: RunConfig, config: RunConfig, step: int) -> None:
    """Raise a ValueError if the settings move a phase's end across steps that are done."""
    for name, old, new in (
        ("dense_steps", before.train.switch_step, config.train.switch_step),
        ("selector_steps", before.train.selector_steps, config.train.selector_steps),
    ):
        dense = min(step, old)  # steps so far in which attention was dense
        if min(step, new) == dense:
            continue
        fix = f"{step} or more" if dense == step else f"{old}, as before"
        raise ValueError(
            f"train.{name} = {new}: the run was dense in {dense} of its {step} steps; set "
            f"it to {fix}, or start a fresh run in another folder"
        )
    if step < max(config.train.switch_step, config.train.selector_steps):  # a phase is not over
        config.check_phases()


def check_groups(before: RunConfig, config: RunConfig) -> None:
    """Raise a ValueError if value projections gain or lose their own group of parameters."""
    if (before.train.value_rate == 1) != (config.train.value_rate == 1):
        raise ValueError(
            f"train.value_rate = {config.train.value_rate}: the run began with "
            f"{before.train.value_rate}, and its optimizer state has other parameter groups; leave "
            "it, or start a fresh run in another folder"
        )


def read_state(saved: Checkpoint) -> TrainState:
    """Return a checkpoint's TrainState; raise a ValueError if a field has another type."""
    state = TrainState(step=saved.step)
    for name, value in saved.train_state.items():
        if type(value) is not type(getattr(state, name, None)):
            problem = f"{name} = {short_repr(value)} is not valid; use another checkpoint"
            raise ValueError(f"{saved.folder}: {problem}")
        setattr(state, name, value)
    return state


def find_initial_weights(config: RunConfig) -> Path | None:
    """Return train.start_from, or the newest checkpoint in it; None for random weights."""
    if config.train.start_from is None:
        return None
    try:
        weights = find_weights(Path(config.train.start_from))
        file = weights / "config.json"
        if file.is_file() and not (weights / "config.yaml").is_file():
            model_type = read_object(file).get("model_type")
            if model_type != "nsa":
                raise ValueError(
                    f"{weights}: is a model of transformers (model_type = "
                    f"{short_repr(model_type)}); convert it: nsa import {weights} --to "
                    "runs/nsa-start"
                )
        return weights
    except ValueError as error:
        raise ValueError(
            f"train.start_from = {error}; or set train.start_from=null for random weights"
        ) from None


def agree_on_run(
    collectives: CpuCollectives, run_dir: Path, checkpoint: Path | None
) -> tuple[Path, list[tuple[str, int]]]:
    """Return rank 0's run folder and every rank's host and process; refuse different checkpoints.

    Without --run-dir, ranks may disagree: one that sees rank 0's new folder takes the next name.
    """
    process = os.uname().nodename, os.getpid()
    kind = tuple[Path, Path | None, tuple[str, int]]
    of_ranks = collectives.gather((run_dir, checkpoint, process), kind)
    folders, checkpoints, processes = zip(*of_ranks, strict=True)
    for rank, other in enumerate(checkpoints):
        if other != checkpoints[0]:
            raise ValueError(
                f"--resume: rank 0 found checkpoint {checkpoints[0]} and rank {rank} found "
                f"{other}; put --run-dir on a file system that all ranks share"
            )
    return folders[0], list(processes)


def convert_to_universal(
    collectives: CpuCollectives, saved: Checkpoint, ranks: Ranks
) -> Checkpoint:
    """Let rank 0 convert a checkpoint if another number of ranks saved it; return the result."""
    if not needs_universal(saved, ranks.world_size):
        return saved
    error = None
    if ranks.rank == 0:
        try:
            saved = to_universal(saved)
        except ValueError as raised:
            error = raised
    collectives.barrier(error)
    return collectives.gather(saved, Checkpoint)[0]
