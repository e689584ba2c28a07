"""Reading a checkpoint back, and refusing in time what DeepSpeed cannot read."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nsa.checkpoint.manifest import STATE, rank_file, rng_file
from nsa.checkpoint.rng import restore_rng

# DeepSpeed keeps optimizer state whole in stage 0, sharded by gradients' owner in stages 1 and 2,
# and with the weights in stage 3; it reads none of the three as another.
LAYOUT_OF_STAGE = {0: "0", 1: "1 or 2", 2: "1 or 2", 3: "3"}
ANY = "any"  # number of ranks that a universal checkpoint loads on


def read_train_state(checkpoint: Path) -> dict[str, Any]:
    """The training state that a checkpoint holds."""
    return _read(checkpoint)["state"]


def read_topology(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint was saved under: `layout`, `precision` and `ranks`."""
    return _read(checkpoint)["saved_under"]


def read_tokenizer(checkpoint: Path) -> dict[str, str] | None:
    """`name` and `fingerprint` of the tokenizer; None where a folder has them not recorded."""
    return _read(checkpoint).get("tokenizer") if (checkpoint / STATE).is_file() else None


def read_rank_state(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """What one rank had to remember; None where that was nothing."""
    path = checkpoint / rank_file(rank)
    return json.loads(path.read_text()) if path.exists() else None


def load(engine: Any, checkpoint: Path) -> dict[str, Any]:
    """Restore weights, optimizer and random numbers on every rank; returns the state saved too."""
    written = _read(checkpoint)
    check_loadable(checkpoint, written["saved_under"], setting(engine))
    # DeepSpeed asks its config at each load: an engine that has begun from a universal checkpoint
    # may have to go back to one of its own.
    engine._config.load_universal_checkpoint = written["saved_under"]["ranks"] == ANY
    with contextlib.redirect_stdout(
        io.StringIO()
    ):  # BF16_Optimizer prints what looks like an error
        path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise ValueError(f"{checkpoint} could not be loaded; see DeepSpeed's warning above")
    generators = checkpoint / rng_file(dist.get_rank())
    if generators.exists():  # a rank that the saved run did not have keeps its own
        restore_rng(generators)
    return written["state"]


def check_loadable(checkpoint: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse what DeepSpeed cannot load, before it fails half-way on some rank."""
    for what, fix in (
        ("layout", "choose a DeepSpeed config of ZeRO stage {saved}"),
        ("precision", "set train.precision={saved}"),
        ("ranks", "start {saved} ranks, or add --universal to convert it"),
    ):
        if what == "ranks" and saved["layout"] == "0":
            continue  # whole on rank 0: as many ranks as you like
        if saved[what] not in (asked[what], ANY):
            name = "ZeRO stage" if what == "layout" else what
            raise ValueError(
                f"{checkpoint} was saved with {name} {saved[what]}, and this run has {name} "
                f"{asked[what]}: DeepSpeed cannot load one as the other; "
                f"{fix.format(saved=saved[what])}"
            )


def setting(engine: Any) -> dict[str, Any]:
    """What decides whether a checkpoint of `engine` loads into another one."""
    precision = "bf16" if engine.bfloat16_enabled() else "fp16"
    if not engine.bfloat16_enabled() and not engine.fp16_enabled():
        precision = "fp32"
    return {
        "layout": LAYOUT_OF_STAGE[engine.zero_optimization_stage()],
        "precision": precision,
        "ranks": dist.get_world_size(),
    }


def _read(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
