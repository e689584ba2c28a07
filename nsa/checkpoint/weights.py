"""The weights of a checkpoint and nothing else, for a run that begins with them."""

from __future__ import annotations

from pathlib import Path

import torch

from nsa.checkpoint.manifest import complaint, newest_whole
from nsa.checkpoint.store import ANY, saved_under

WEIGHTS = "mp_rank_00_model_states.pt"  # DeepSpeed's: whole on rank 0 but for ZeRO stage 3


def find_weights(place: Path) -> Path:
    """The checkpoint that `place` is, or the newest whole one of the run whose folder it is."""
    found, wrong = place, complaint(place)
    if (place / "checkpoints").is_dir():
        newest, notes = newest_whole(place / "checkpoints")
        found, wrong = newest or place, None if newest else "; ".join(notes) or "nothing is saved"
    elif not place.is_dir():
        wrong = "there is no such folder"
    if wrong is None:
        under = saved_under(found)
        if under["layout"] == "3" or under["ranks"] == ANY:
            wrong = "ZeRO stage 3 and --universal divide the weights; take one of stage 0, 1 or 2"
    if wrong is not None:
        raise ValueError(
            f"train.start_from = '{place}': {wrong}; name the folder of a run or of one of its "
            "checkpoints, or set train.start_from=null to begin with random weights"
        )
    return found


def load_weights(model: torch.nn.Module, checkpoint: Path) -> None:
    """Put them into `model`, which must have the same parameters."""
    saved = torch.load(checkpoint / WEIGHTS, map_location="cpu", weights_only=False)["module"]
    own = model.state_dict()
    for name in sorted(own.keys() | saved.keys()):
        shapes = [tuple(those[name].shape) if name in those else None for those in (own, saved)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"train.start_from: {name} is {shapes[1]} in {checkpoint} and {shapes[0]} in this "
                "model; set model.* as that run had them (its config.yaml says how)"
            )
    model.load_state_dict(saved)
