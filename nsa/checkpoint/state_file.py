"""state.json of a checkpoint: training state, topology and tokenizer; and rank<k>.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nsa.checkpoint.manifest import STATE, rank_file

# DeepSpeed keeps the optimizer state complete in stage 0, sharded in stages 1 and 2, and sharded
# together with the weights in stage 3. It cannot load one of these layouts as another.
LAYOUT_OF_STAGE = {0: "0", 1: "1 or 2", 2: "1 or 2", 3: "3"}
ANY = "any"  # `ranks` of a universal checkpoint, which loads on any number


def read_train_state(checkpoint: Path) -> dict[str, Any]:
    return read_state_file(checkpoint)["state"]


def read_topology(checkpoint: Path) -> dict[str, Any]:
    """Return `layout`, `precision` and `ranks` of the run that saved the checkpoint."""
    return read_state_file(checkpoint)["saved_under"]


def read_tokenizer(checkpoint: Path) -> dict[str, str] | None:
    """Return `name` and `fingerprint` of the tokenizer; None if they are not recorded."""
    return read_state_file(checkpoint).get("tokenizer") if (checkpoint / STATE).is_file() else None


def read_rank_state(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """Return the state of one rank; None if it had none."""
    path = checkpoint / rank_file(rank)
    return json.loads(path.read_text()) if path.exists() else None


def read_state_file(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def check_loadable(checkpoint: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise a ValueError if DeepSpeed cannot load topology `saved` into `current`."""
    for key, name, fix in (
        ("layout", "ZeRO stage {}", "choose a DeepSpeed config of ZeRO stage {}"),
        ("precision", "precision {}", "set train.precision={}"),
        ("ranks", "world size {}", "start {} ranks, or add --universal to convert it"),
    ):
        if key == "ranks" and saved["layout"] == "0":
            continue  # rank 0 holds everything
        if saved[key] not in (current[key], ANY):
            raise ValueError(
                f"{checkpoint} was saved with {name.format(saved[key])}, and this run has "
                f"{name.format(current[key])}: DeepSpeed cannot load one as the other; "
                f"{fix.format(saved[key])}"
            )
