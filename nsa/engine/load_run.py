"""Load a trained run for inference: config, tokenizer and model, without DeepSpeed or ranks."""

from __future__ import annotations

import math
import warnings
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from nsa.checkpoint.state_file import read_state_file, read_tokenizer
from nsa.checkpoint.weights import find_weights, has_safetensors, read_weights, set_weights
from nsa.data.config import DataConfig
from nsa.data.shards import is_prepared, read_index
from nsa.data.source import DataError
from nsa.data.tokenizer import Tokenizer, build_tokenizer
from nsa.engine.config import RunConfig, read_saved_config
from nsa.model import LanguageModel
from nsa.model.language_model import meta_model
from nsa.text import printable

CONFIG = "config.yaml"


@dataclass(kw_only=True)
class StoredRun:
    """A run on disk; `load_run` sets `model`."""

    config: RunConfig  # data.tokenizer names the tokenizer that the model was trained with
    tokenizer: Tokenizer | None  # None, after a warning, if it is not available
    folder: Path  # the run's folder, or `weights_folder` outside a run
    weights_folder: Path
    step: int | None  # step of the checkpoint; None for an export
    model: LanguageModel = field(init=False, repr=False)  # in eval mode


def find_run(path: Path | str) -> StoredRun:
    """Locate a run, one of its checkpoints, or the output of `nsa export` or `nsa import`.

    Raise most errors of `load_run`, but read no weights.
    """
    folder = find_weights(Path(path)).resolve()
    config = read_config(folder)
    try:
        tokenizer: Tokenizer | None = run_tokenizer(config.data, folder)
    except DataError as error:
        warnings.warn(f"no tokenizer: {printable(str(error))}", stacklevel=2)
        tokenizer = None
    return StoredRun(
        config=config,
        tokenizer=tokenizer,
        folder=folder.parent.parent if folder.parent.name == "checkpoints" else folder,
        weights_folder=folder,
        step=None if has_safetensors(folder) else read_state_file(folder).step,
    )


def load_run(
    run: StoredRun | Path | str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> StoredRun:
    """Load a run from a path that `find_run` accepts, or from its result.

    `device` defaults to CUDA if available, `dtype` to the dtype of the saved weights; float32 loads
    the optimizer's master weights.
    """
    loaded = copy(run) if isinstance(run, StoredRun) else find_run(run)
    weights = read_weights(loaded.weights_folder, dtype)
    loaded.model = model_with(weights, loaded.config, loaded.weights_folder)
    loaded.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return loaded


def model_with(weights: dict[str, torch.Tensor], config: RunConfig, source: Path) -> LanguageModel:
    """Return the model in eval mode, with these tensors as its parameters."""
    model = meta_model(config.model)
    set_weights(model, weights, source, assign=True)
    return model.eval()


def read_config(folder: Path) -> RunConfig:
    """Return the config of the run whose weights are in `folder`.

    A universal checkpoint has no config.yaml: the file of its run is read instead.
    """
    file = folder / CONFIG
    if not file.is_file() and not has_safetensors(folder):
        file = folder.parent.parent / CONFIG
    if not file.is_file():
        hf = (folder / "config.json").is_file()
        fix = f"; convert it: nsa import {folder} --to runs/imported" if hf else ""
        raise ValueError(f"'{folder}' has no {CONFIG}{fix}")
    config, _ = read_saved_config(file)
    if recorded := read_tokenizer(folder):  # not data.tokenizer, if the data was prepared
        config.data.tokenizer = recorded["name"]
    return config


def run_tokenizer(data: DataConfig, folder: Path) -> Tokenizer:
    """Return the tokenizer that the run in `folder` was trained with.

    A checkpoint records its tokenizer. An export holds its tokenizer's files; `byte` needs none.
    """
    recorded = read_tokenizer(folder)
    if recorded is None:
        if data.tokenizer != "byte" and (folder / "tokenizer.json").is_file():
            data = replace(data, tokenizer=f"hf:{folder}")
        return build_tokenizer(data)
    tokenizer = build_tokenizer(replace(data, tokenizer=recorded["name"]))
    if tokenizer.fingerprint != recorded["fingerprint"]:
        raise DataError(
            f"data.source = {', '.join(data.sources())!r}: was tokenized with "
            f"{recorded['name']!r}, which has changed since; restore that tokenizer"
        )
    return tokenizer


def dataset_vocabulary(data: DataConfig) -> int | None:
    """Return the vocabulary size for prepared sources; None if no source is prepared.

    It is rounded up to a multiple of 64: GPUs multiply by such a head fastest.
    """
    sizes = [read_index(name).stamp.vocab_size for name in data.sources() if is_prepared(name)]
    return math.ceil(max(sizes) / 64) * 64 if sizes else None
