"""Untrained models in folders that load like runs."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from nsa.engine.config import RunConfig, resolve_config, to_yaml
from nsa.model import LanguageModel
from tests.engine.runs import TINY


def write_model(folder: Path, *settings: str) -> Path:
    """Write a tiny random model with diverse predictions, as `nsa import` writes one."""
    tiny = [setting.removeprefix("--set=") for setting in TINY]
    config = resolve_config(RunConfig(), None, [*tiny, "model.vocab_size=320", *settings])
    torch.manual_seed(0)
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    model = LanguageModel(config.model)
    model.initialize(0.3)
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder
