"""Saving an engine and finding what was saved.

    checkpoints/latest                    the newest complete checkpoint's name
    checkpoints/step00005000/state.json   training state, and the setting it was saved under
    checkpoints/step00005000/rank0.json   what rank 0 alone remembers, if anything
    checkpoints/step00005000/*.pt         DeepSpeed's shards

DeepSpeed writes its own `latest` before the other ranks are done, so that it can name a folder
with a shard missing; here it is written last, in one move.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nsa.disk import atomic_write_text

LATEST = "latest"
STATE = "state.json"
# DeepSpeed keeps optimizer state whole in stage 0, sharded by gradients' owner in stages 1 and 2,
# and with the weights in stage 3; it reads none of the three as another.
LAYOUT_OF_STAGE = {0: "0", 1: "1 or 2", 2: "1 or 2", 3: "3"}


def save(
    engine: Any,
    folder: Path,
    step: int,
    state: dict[str, Any],
    rank_state: dict[str, Any] | None = None,
) -> Path:
    """Write the engine's shards and the states; every rank must call it with the same step.

    `state` is rank 0's and the same for all; `rank_state` is each rank's own.
    """
    tag = f"step{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    if rank_state is not None:
        atomic_write_text(
            folder / tag / f"rank{dist.get_rank()}.json", json.dumps(rank_state) + "\n"
        )
    dist.barrier()
    if dist.get_rank() == 0:
        text = json.dumps({"state": state, "saved_under": _setting(engine)}, indent=2)
        atomic_write_text(folder / tag / STATE, text + "\n")
        atomic_write_text(folder / LATEST, tag)
    dist.barrier()
    return folder / tag


def newest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names; None where nothing was saved."""
    try:
        path = folder / (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if not (path / STATE).is_file():
        others = sorted(found.parent.name for found in folder.glob(f"*/{STATE}"))
        raise ValueError(
            f"{folder / LATEST} names {path.name}, which is not there or not complete; write one "
            f"of these into it: {', '.join(others) or 'there is none'}"
        )
    return path


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """The training state that a checkpoint holds."""
    return json.loads((checkpoint / STATE).read_text())["state"]


def saved_rank_state(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """What one rank had to remember; None where that was nothing."""
    path = checkpoint / f"rank{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def load(engine: Any, checkpoint: Path) -> dict[str, Any]:
    """Restore weights and optimizer on every rank; returns the state saved with them."""
    written = json.loads((checkpoint / STATE).read_text())
    check_loadable(checkpoint, written["saved_under"], _setting(engine))
    with contextlib.redirect_stdout(
        io.StringIO()
    ):  # BF16_Optimizer prints what looks like an error
        path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise ValueError(f"{checkpoint} could not be loaded; see DeepSpeed's warning above")
    return written["state"]


def check_loadable(checkpoint: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse what DeepSpeed cannot load, before it fails half-way on some rank."""
    for what, mend in (
        ("layout", "choose a DeepSpeed config of ZeRO stage {saved}"),
        ("precision", "set train.precision={saved}"),
        (
            "ranks",
            "start {saved} ranks, or convert it with `python -m deepspeed.checkpoint."
            "ds_to_universal`",
        ),
    ):
        if saved[what] != asked[what]:
            name = "ZeRO stage" if what == "layout" else what
            raise ValueError(
                f"{checkpoint} was saved with {name} {saved[what]}, and this run has {name} "
                f"{asked[what]}: DeepSpeed cannot load one as the other; "
                f"{mend.format(saved=saved[what])}"
            )


def _setting(engine: Any) -> dict[str, Any]:
    precision = "bf16" if engine.bfloat16_enabled() else "fp16"
    if not engine.bfloat16_enabled() and not engine.fp16_enabled():
        precision = "fp32"
    return {
        "layout": LAYOUT_OF_STAGE[engine.zero_optimization_stage()],
        "precision": precision,
        "ranks": dist.get_world_size(),
    }
