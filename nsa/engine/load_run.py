"""A run that has been trained, opened for use: no DeepSpeed, no ranks, and nothing is written."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nsa.checkpoint.state_file import read_tokenizer, read_train_state
from nsa.checkpoint.weights import find_weights, has_safetensors, read_weights, set_weights
from nsa.data.batch_source import source_names
from nsa.data.config import DataConfig
from nsa.data.source import DataError, is_path
from nsa.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from nsa.engine.config import RunConfig
from nsa.engine.resolve import resolve_config
from nsa.model import LanguageModel

CONFIG = "config.yaml"


@dataclass(kw_only=True)
class StoredRun:
    """A run before its weights are read, which takes long, and how to talk to it."""

    config: RunConfig  # data.tokenizer is the one that the model has learned with
    tokenizer: Tokenizer | None  # None where it cannot be had here; a warning has said why
    place: Path  # the run's folder, or what was asked for where there is none
    weights: Path  # the folder that the weights are from
    step: int | None  # that they were saved at; None where they are no checkpoint's


@dataclass(kw_only=True)
class LoadedRun(StoredRun):
    """What a run has learned, and how to talk to it."""

    model: LanguageModel  # in eval mode


def load_run(
    place: Path | str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedRun:
    """A run's folder, one of its checkpoints, or what `nsa export` and `nsa import` wrote.

    On CUDA where there is a device, with the weights as they were trained; in float32 they are
    those that the optimizer had kept.
    """
    return load_stored_run(find_run(place), device=device, dtype=dtype)


def find_run(place: Path | str) -> StoredRun:
    """All of `load_run` but the weights: what can be refused is refused here."""
    found = find_weights(Path(place)).resolve()  # its parents are looked at
    config = config_of(found)
    tokenizer = _tokenizer(config.data, found)
    if tokenizer is not None and config.data.tokenizer == "byte":
        config.data.tokenizer = tokenizer.name  # of prepared text
    return StoredRun(
        config=config,
        tokenizer=tokenizer,
        place=found.parent.parent if found.parent.name == "checkpoints" else found,
        weights=found,
        step=None if has_safetensors(found) else read_train_state(found)["step"],
    )


def load_stored_run(
    run: StoredRun,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedRun:
    """The run with its weights."""
    with torch.device("meta"):
        model = LanguageModel(run.config.model)
    set_weights(model, read_weights(run.weights, dtype), run.weights, assign=True)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    return LoadedRun(**vars(run), model=model)


def config_of(found: Path) -> RunConfig:
    """The settings of the run whose weights lie in `found`.

    A checkpoint has them with it; one that DeepSpeed has converted finds them in the run's folder.
    """
    own, of_run = found / CONFIG, found.parent.parent / CONFIG
    if own.is_file():
        config = resolve_config(RunConfig(), own)
        made = read_tokenizer(found)
        if made is not None:
            config.data.tokenizer = made["name"]
        return config
    if of_run.is_file() and not has_safetensors(found):
        return resolve_config(RunConfig(), of_run)
    fix = f"; make a run of it with: nsa import {found} --to runs/imported"
    raise ValueError(f"'{found}' has no {CONFIG}{fix if (found / 'config.json').is_file() else ''}")


def _tokenizer(data: DataConfig, found: Path) -> Tokenizer | None:
    """The one that made the run's tokens."""
    try:
        return open_tokenizer(data, found)
    except DataError as error:
        warnings.warn(f"there is no tokenizer: {error}", stacklevel=3)
        return None


def open_tokenizer(data: DataConfig, found: Path) -> Tokenizer:
    """Files that lie beside the weights come first, then what is recorded with a checkpoint.

    What neither knows is in prepared text alone: without that, nothing says that it was bytes.
    """
    beside = (found / "tokenizer.json").is_file()
    if beside and data.tokenizer != "byte":
        return _from_files(data, found)
    made = read_tokenizer(found) or _prepared_with(data)
    if made is None and data.tokenizer == "byte":
        gone = _out_of_sight(data)
        if gone and beside:
            return _from_files(data, found)
        if gone:
            raise DataError(
                f"data.source = {gone!r} is not there, and which tokenizer made its tokens is "
                "recorded nowhere else; bring it back, or start where its path leads to it"
            )
    if made is None:
        return build_tokenizer(data)
    tokenizer = build_tokenizer(replace(data, tokenizer=made["name"]))
    if tokenizer.fingerprint != made["fingerprint"]:
        raise DataError(
            f"the tokens of data.source = {source_names(data)!r} were made with a tokenizer "
            f"{made['name']!r} that is no longer the same; bring that back"
        )
    return tokenizer


def _prepared_with(data: DataConfig) -> dict[str, str] | None:
    from nsa.data.shards import is_prepared, read_index

    for name in filter(is_prepared, data.parts()):
        stamp = read_index(Path(name).expanduser()).stamp
        return {"name": stamp.tokenizer, "fingerprint": stamp.tokenizer_fingerprint}
    return None


def _from_files(data: DataConfig, found: Path) -> Tokenizer:
    tokenizer = build_tokenizer(replace(data, tokenizer=f"hf:{found}"))
    own = ByteTokenizer()  # `nsa export` writes it with the same ids
    bytes_alone = (tokenizer.vocab_size, tokenizer.eos_id) == (own.vocab_size, own.eos_id)
    return own if bytes_alone else tokenizer


def _out_of_sight(data: DataConfig) -> str:
    """Files and folders of `data.source` that are not there."""
    paths = filter(is_path, data.parts())
    return ", ".join(path for path in paths if not Path(path).expanduser().exists())
