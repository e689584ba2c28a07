"""Model weights on the CPU, read from a checkpoint of any layout or a Hugging Face folder.

ZeRO stage 0         all weights and fp32 master weights in one file
ZeRO stage 1, 2      all weights in one file; master weights sharded in the optimizer's files
ZeRO stage 3         master weights only, sharded
universal            all weights in one file; each master weight in its own
safetensors          as `nsa export` and `nsa import` write them
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.checkpoint.commit import MANIFEST, find_problem, newest_valid
from nsa.checkpoint.state_file import ANY_RANKS, read_state_file
from nsa.dtypes import DTYPES
from nsa.system import user_path
from nsa.text import printable, type_and_message
from nsa.untrusted import data_only, open_regular, parse_json, read_text

WEIGHTS = "mp_rank_00_model_states.pt"  # DeepSpeed's name, except for stage 3
SAFETENSORS = "model.safetensors"
INDEX = f"{SAFETENSORS}.index.json"
# transformers writes "model.norm.weight" and "lm_head.weight" for norm.weight and head.weight.
TRANSFORMERS_PREFIX = re.compile(r"^(model\.|lm_(?=head\.))")


def find_weights(path: Path) -> Path:
    """Return the folder to read: `path`, or the newest valid checkpoint of a run's folder.

    Warn of damaged checkpoints that are skipped.
    """
    problem: str | None
    path = user_path(path)
    if not path.is_dir():
        problem = "there is no such folder"
    elif has_safetensors(path):
        return path
    elif (path / "checkpoints").is_dir():
        newest, notes = newest_valid(path / "checkpoints")
        if newest is not None:
            for note in notes:
                warnings.warn(f"skipped: {printable(note)}", stacklevel=2)
            return newest
        problem = "; ".join(notes) or "nothing is saved"
    elif (path / MANIFEST).exists():
        problem = find_problem(path)
        if problem is None:
            return path
    else:
        problem = f"it holds neither checkpoints/ nor {SAFETENSORS}, and is no checkpoint"
    raise ValueError(
        f"'{path}': {problem}; name the folder of a run, of one of its checkpoints, or one that "
        "`nsa export` or `nsa import` wrote"
    )


def has_safetensors(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SAFETENSORS, INDEX))


def read_weights(folder: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return all weights by name, in `dtype` or as they were trained.

    In float32 these are the optimizer's master weights, which the trained weights are rounded from.
    Raise a ValueError if the files do not hold weights.
    """
    try:
        return _read_weights(folder, dtype)
    except (OSError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise ValueError(
            f"the weights of '{folder}' cannot be read ({type_and_message(error)}); "
            "use another checkpoint"
        ) from error


def _read_weights(folder: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    if has_safetensors(folder):
        weights = read_safetensors(folder)
        return {name: weight.to(dtype or weight.dtype) for name, weight in weights.items()}
    topology = read_state_file(folder).topology
    if topology.layout == "3":
        return _stage_3_weights(folder, dtype or DTYPES[topology.precision])
    saved = _load_mapped(folder / WEIGHTS)
    trained: dict[str, Tensor] = saved["module"]
    named: Iterable[tuple[str, Tensor]] = trained.items()
    if dtype == torch.float32 and topology.precision != "fp32":
        if topology.layout == "0":
            named = _master_weights_stage_0(trained, saved["optimizer"]["fp32_groups"])
        elif topology.ranks == ANY_RANKS:  # universal
            files = (folder / "zero").glob("*/fp32.pt")
            named = ((file.parent.name, _load_mapped(file)["param"]) for file in files)
        else:
            named = _master_weights_stage_1_2(folder, int(topology.ranks), trained)
    # Copy: memory-mapped tensors would change or disappear with the file.
    return {name: weight.to(dtype or weight.dtype, copy=True) for name, weight in named}


def set_weights(
    model: torch.nn.Module, weights: dict[str, Tensor], source: Path, *, assign: bool = False
) -> None:
    """Put weights into `model`; with `assign` they replace its parameters' tensors."""
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            raise ValueError(
                f"the weights of '{source}' do not fit this model: {name} is {shapes.get(name)} "
                f"there and {expected.get(name)} here; set model.* as in that run's config.yaml"
            )
        dtype = weights[name].dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:  # integers, and fp8
            raise ValueError(
                f"the weights of '{source}': {name} is {dtype}; save the model in bfloat16"
            )
    model.load_state_dict(weights, assign=assign)


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Read model.safetensors, or all files of its index; strip the prefixes of transformers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names, weights = [SAFETENSORS], dict[str, Tensor]()
    if not (folder / SAFETENSORS).is_file():
        try:
            index = parse_json(read_text(folder / INDEX))
            names = sorted({Path(str(name)).name for name in index["weight_map"].values()})
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(
                f"{folder / INDEX} is damaged: it has no weight_map, which names the files of "
                "weights; copy or save the model again"
            ) from None
    for name in names:
        open_regular(folder / name).close()  # raises for a pipe; safetensors would wait for it
        try:
            tensors = load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged: {error}") from None
        weights |= {TRANSFORMERS_PREFIX.sub("", key): tensor for key, tensor in tensors.items()}
    return weights


def _load_mapped(file: Path, *, optimizer: bool = False) -> Any:
    """Load a file of torch.save memory-mapped, so that unused tensors are not read."""
    with _silence(), data_only(file.parent, optimizer=optimizer):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _master_weights_stage_0(
    trained: dict[str, Tensor], groups: list[list[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Match fp32 tensors, which have no names, to the trained weights that they round to."""
    remaining = [list(group) for group in groups]
    for name, weight in trained.items():
        for group in remaining:
            if group and torch.equal(group[0].to(weight.dtype), weight):
                yield name, group.pop(0)
                break
        else:
            raise ValueError(f"the optimizer has no master weights that round to {name}")


def _master_weights_stage_1_2(
    folder: Path, ranks: int, trained: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Join the ranks' partitions: DeepSpeed's zero_to_fp32 does not support BF16_Optimizer."""
    pieces: dict[str, list[Tensor]] = {name: [] for name in trained}
    for rank in range(ranks):
        (file,) = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        state = _load_mapped(file, optimizer=True)["optimizer_state_dict"]
        partitions = state["single_partition_of_fp32_groups"]
        for flat, slices in zip(partitions, state["param_slice_mappings"], strict=True):
            for name, piece in slices.items():
                pieces[name].append(flat[piece.start : piece.start + piece.numel])
    for name, weight in trained.items():
        yield name, torch.cat(pieces.pop(name)).view(weight.shape)


def _stage_3_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gather the optimizer's shards with DeepSpeed's functions, one weight at a time."""
    with _silence(), data_only(folder):
        from deepspeed.utils.zero_to_fp32 import (
            get_fp32_state_dict_from_zero_checkpoint,
            to_torch_tensor,
        )

        shards = get_fp32_state_dict_from_zero_checkpoint(
            str(folder.parent), folder.name, lazy_mode=True
        )
        return to_torch_tensor(shards, dtype=dtype)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop DeepSpeed's output on import, and its progress bars."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield
