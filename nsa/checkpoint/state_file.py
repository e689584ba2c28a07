"""state.json of a checkpoint: the training state, and the run that saved it.

DeepSpeed loads a checkpoint only into an engine of the same topology: layout of the optimizer
state, precision, number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa.dtypes import DTYPES
from nsa.untrusted import matches, read_object

STATE = "state.json"
MAX_RANKS = 65_536  # a file that names more is damaged
ANY_RANKS = "any"  # `ranks` of a universal checkpoint, which loads on any number


def layout_of(stage: int) -> str:
    """Name the layout of DeepSpeed's optimizer state, which loads only into the same layout.

    The state is complete in stage 0, sharded in stages 1 and 2, and sharded together with the
    weights in stage 3.
    """
    return "1 or 2" if stage in (1, 2) else str(stage)


@dataclass(frozen=True)
class Topology:
    """The properties of a run that must be equal for DeepSpeed to load its checkpoints."""

    layout: str  # of the optimizer state, from `layout_of`
    precision: str  # bf16, fp16 or fp32
    ranks: int | str  # world size, or ANY_RANKS


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint's state.json."""

    folder: Path
    train_state: dict[str, Any]  # the same on all ranks
    topology: Topology  # of the run that saved it
    tokenizer: Mapping[str, str] | None = None  # name and fingerprint, if they are recorded

    @property
    def step(self) -> int:
        """Number of optimizer steps before the checkpoint."""
        step = self.train_state.get("step")
        if type(step) is not int or not 0 <= step < 2**62:
            raise ValueError(f"{self.folder / STATE}: step = {step!r}; use another checkpoint")
        return step

    def to_json(self) -> str:
        """Return the text of state.json."""
        content: dict[str, Any] = {"state": self.train_state, "saved_under": asdict(self.topology)}
        if self.tokenizer is not None:
            content["tokenizer"] = dict(self.tokenizer)
        return json.dumps(content, indent=2) + "\n"


def read_state_file(checkpoint: Path) -> Checkpoint:
    """Read state.json; raise a ValueError if a part that readers need is missing or wrong."""
    content = read_object(checkpoint / STATE, "a checkpoint", "; use another")
    saved: Any = content.get("saved_under")
    tokenizer = content.get("tokenizer")
    if not (
        matches(content.get("state"), dict)
        and matches(saved, {"layout": str, "precision": str, "ranks": (int, str)})
        and saved["layout"] in map(layout_of, range(4))
        and saved["precision"] in DTYPES
        and (saved["ranks"] == ANY_RANKS or saved["ranks"] in range(1, MAX_RANKS + 1))
        and (tokenizer is None or matches(tokenizer, {"name": str, "fingerprint": str}))
    ):
        raise ValueError(f"{checkpoint / STATE} holds no state of a checkpoint; use another")
    topology = Topology(saved["layout"], saved["precision"], saved["ranks"])
    return Checkpoint(checkpoint, content["state"], topology, tokenizer)


def read_tokenizer(folder: Path) -> Mapping[str, str] | None:
    """Return name and fingerprint of a checkpoint's tokenizer; None if they are not recorded."""
    return read_state_file(folder).tokenizer if (folder / STATE).is_file() else None


def check_loadable(checkpoint: Path, saved: Topology, current: Topology) -> None:
    """Raise a ValueError if a run of topology `current` cannot load a checkpoint of `saved`."""
    for key, name, fix in (
        ("layout", "ZeRO stage {}", "choose a DeepSpeed config of ZeRO stage {}"),
        ("precision", "precision {}", "set train.precision={}"),
        ("ranks", "world size {}", "start {} ranks, or add --universal to convert it"),
    ):
        if key == "ranks" and saved.layout == "0":
            continue  # rank 0 holds everything
        here, there = getattr(current, key), getattr(saved, key)
        if there not in (here, ANY_RANKS):
            raise ValueError(
                f"{checkpoint} was saved with {name.format(there)}, and this run has "
                f"{name.format(here)}: DeepSpeed cannot load one as the other; {fix.format(there)}"
            )
