"""The weights of a checkpoint and nothing else, whatever its layout, on the processor.

ZeRO stage 0, 1, 2   whole on rank 0, with DeepSpeed's other state; fp32 ones in the optimizer
ZeRO stage 3         in shards, as fp32 alone
universal            as in the stage that it was made from; fp32 ones a file each
safetensors          what `nsa export` and `nsa import` write
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.checkpoint.manifest import find_problem, newest_complete
from nsa.checkpoint.state_file import ANY, read_topology
from nsa.dtypes import DTYPES

WEIGHTS = "mp_rank_00_model_states.pt"  # DeepSpeed's, but for stage 3
SAFETENSORS = "model.safetensors"
SHARDED = f"{SAFETENSORS}.index.json"


def find_weights(place: Path) -> Path:
    """The folder to read from: `place` itself, or the newest whole checkpoint of that run.

    What is passed over as broken is warned of.
    """
    found, wrong = place, find_problem(place)
    if not place.is_dir():
        wrong = "there is no such folder"
    elif has_safetensors(place):
        wrong = None
    elif (place / "checkpoints").is_dir():
        newest, notes = newest_complete(place / "checkpoints")
        for note in notes if newest else ():
            warnings.warn(f"passed over: {note}", stacklevel=2)
        found, wrong = newest or place, None if newest else "; ".join(notes) or "nothing is saved"
    elif not (place / "manifest.json").exists():
        wrong = f"it holds neither checkpoints/ nor {SAFETENSORS}, and is no checkpoint"
    if wrong is not None:
        raise ValueError(
            f"'{place}': {wrong}; name the folder of a run, of one of its checkpoints, or one that "
            "`nsa export` or `nsa import` wrote"
        )
    return found


def has_safetensors(folder: Path) -> bool:
    """Whether weights lie in `folder` as Hugging Face's libraries leave them."""
    return any((folder / name).is_file() for name in (SAFETENSORS, SHARDED))


def read_weights(found: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All weights by name, in `dtype`, or as they were trained.

    In float32 they are those that the optimizer keeps, which the trained ones are rounded from.
    """
    if has_safetensors(found):
        return {
            name: weight.to(dtype or weight.dtype)
            for name, weight in read_safetensors(found).items()
        }
    under = read_topology(found)
    if under["layout"] == "3":
        return _of_stage_3(found, dtype or DTYPES[under["precision"]])
    saved = _mapped(found / WEIGHTS)
    trained: dict[str, Tensor] = saved["module"]
    named: Iterable[tuple[str, Tensor]] = trained.items()
    if dtype == torch.float32 and under["precision"] != "fp32":
        if under["layout"] == "0":
            named = _exact_of_stage_0(trained, saved["optimizer"]["fp32_groups"])
        elif under["ranks"] == ANY:
            named = _exact_of_universal(found)
        else:
            named = _exact_of_stages_1_and_2(found, under["ranks"], trained)
    # Copies: what is mapped would change, or be gone, with the file.
    return {name: weight.to(dtype or weight.dtype, copy=True) for name, weight in named}


def load_weights(model: torch.nn.Module, found: Path) -> None:
    """Put them into `model`, which must have the same parameters."""
    set_weights(model, read_weights(found), found)


def set_weights(
    model: torch.nn.Module, weights: dict[str, Tensor], found: Path, *, assign: bool = False
) -> None:
    """Put weights of `found` into `model`; with `assign` they take its parameters' places."""
    own = model.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        shapes = [tuple(those[name].shape) if name in those else None for those in (own, weights)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the weights of '{found}' do not fit this model: {name} is {shapes[1]} there and "
                f"{shapes[0]} here; set model.* as that run had them (its config.yaml says how)"
            )
    model.load_state_dict(weights, assign=assign)


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """What a folder's one file holds, or the many that its index names.

    transformers puts "model." before the names of all that is not the head.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names, weights = [SAFETENSORS], dict[str, Tensor]()
    if not (folder / SAFETENSORS).is_file():
        names = _shards(folder / SHARDED)
    for name in names:
        try:
            saved = load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged: {error}") from None
        weights |= {key.removeprefix("model."): weight for key, weight in saved.items()}
    return weights


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(
            f"{index} is damaged: it has no weight_map, which names the files of weights; copy or "
            "save the model again"
        ) from None
    return sorted({str(name) for name in names})


def _mapped(file: Path) -> Any:
    """What torch.save wrote, of which only what is used is read."""
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _exact_of_stage_0(
    trained: dict[str, Tensor], groups: list[list[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """They stand in their groups' order, without names: each is the next that rounds to its own."""
    left = [list(group) for group in groups]
    for name, weight in trained.items():
        alike = (
            group
            for group in left
            if group
            and group[0].shape == weight.shape
            and torch.equal(group[0].to(weight.dtype), weight)
        )
        group = next(alike, None)
        if group is None:
            raise ValueError(f"the optimizer's copy of {name} is not what the model has")
        yield name, group.pop(0)


def _exact_of_stages_1_and_2(
    found: Path, ranks: int, trained: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Each rank's share of all weights laid end to end; zero_to_fp32 knows no BF16_Optimizer."""
    pieces: dict[str, list[Tensor]] = {name: [] for name in trained}
    for rank in range(ranks):
        (file,) = found.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        with _silence():  # objects of DeepSpeed's are in it
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        state = state["optimizer_state_dict"]
        groups = zip(
            state["single_partition_of_fp32_groups"], state["param_slice_mappings"], strict=True
        )
        for flat, places in groups:
            for name, place in places.items():
                pieces[name].append(flat[place.start : place.start + place.numel])
    for name, weight in trained.items():
        yield name, torch.cat(pieces.pop(name)).view(weight.shape)


def _exact_of_universal(found: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted((found / "zero").glob("*/fp32.pt")):
        yield file.parent.name, _mapped(file)["param"]


def _of_stage_3(found: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """By DeepSpeed's own functions, one weight after the other, from the optimizer's shards."""
    with _silence():
        from deepspeed.utils.zero_to_fp32 import (
            get_fp32_state_dict_from_zero_checkpoint,
            to_torch_tensor,
        )

        shards = get_fp32_state_dict_from_zero_checkpoint(
            str(found.parent), found.name, lazy_mode=True
        )
        return to_torch_tensor(shards, dtype=dtype)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """DeepSpeed speaks on stdout as soon as it is imported, and draws progress bars."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield
