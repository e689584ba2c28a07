"""A run that has been trained, opened for use: no DeepSpeed, no ranks, and nothing is written."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nsa.checkpoint.store import saved_state
from nsa.checkpoint.weights import find_weights, fit, holds_safetensors, read_weights
from nsa.data.config import DataConfig
from nsa.data.source import DataError
from nsa.data.tokenizer import Tokenizer, build_tokenizer
from nsa.engine.config import RunConfig
from nsa.engine.load import resolve_config
from nsa.model import LanguageModel

CONFIG = "config.yaml"


@dataclass
class OpenedRun:
    """What a run has learned, and how to talk to it."""

    config: RunConfig
    model: LanguageModel  # in eval mode
    tokenizer: Tokenizer | None  # None where it cannot be had here; a warning has said why
    place: Path  # the run's folder, or what was asked for where there is none
    weights: Path  # the folder that the weights are from
    step: int | None  # that they were saved at; None where they are no checkpoint's


def open_run(
    place: Path | str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> OpenedRun:
    """A run's folder, one of its checkpoints, or what `nsa export` and `nsa import` wrote.

    On CUDA where there is a device, with the weights as they were trained; in float32 they are
    those that the optimizer had kept.
    """
    found = find_weights(Path(place))
    config = config_of(found)
    with torch.device("meta"):
        model = LanguageModel(config.model)
    fit(model, read_weights(found, dtype), found, assign=True)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    return OpenedRun(
        config=config,
        model=model,
        tokenizer=_tokenizer(config.data, found),
        place=found.parent.parent if found.parent.name == "checkpoints" else found,
        weights=found,
        step=None if holds_safetensors(found) else saved_state(found)["step"],
    )


def config_of(found: Path) -> RunConfig:
    """The settings of the run whose weights lie in `found`.

    A checkpoint has them with it; one that DeepSpeed has converted finds them in the run's folder.
    """
    own, of_run = found / CONFIG, found.parent.parent / CONFIG
    if own.is_file():
        return resolve_config(RunConfig(), own)
    if of_run.is_file() and not holds_safetensors(found):
        return resolve_config(RunConfig(), of_run)
    mend = f"; make a run of it with: nsa import {found} --to runs/imported"
    raise ValueError(
        f"'{found}' has no {CONFIG}{mend if (found / 'config.json').is_file() else ''}"
    )


def _tokenizer(data: DataConfig, found: Path) -> Tokenizer | None:
    """The one that made the run's tokens."""
    try:
        return open_tokenizer(data, found)
    except DataError as error:
        warnings.warn(f"there is no tokenizer: {error}", stacklevel=3)
        return None


def open_tokenizer(data: DataConfig, found: Path) -> Tokenizer:
    """Files that lie beside the weights come first, then what prepared text was made with."""
    from nsa.data.shards import is_prepared, read_index

    if data.tokenizer != "byte" and (found / "tokenizer.json").is_file():
        return build_tokenizer(replace(data, tokenizer=f"hf:{found}"))
    folders = [name for name in data.parts() if is_prepared(name)]
    if not folders:
        return build_tokenizer(data)
    stamp = read_index(Path(folders[0]).expanduser()).stamp
    tokenizer = build_tokenizer(replace(data, tokenizer=stamp.tokenizer))
    if tokenizer.fingerprint != stamp.tokenizer_fingerprint:
        raise DataError(
            f"data.source = {folders[0]!r} was prepared with a tokenizer {stamp.tokenizer!r} that "
            "is no longer the same"
        )
    return tokenizer
