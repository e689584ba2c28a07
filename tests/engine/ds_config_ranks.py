"""Worker of test_ds_config_engine.py: trains a tiny stack of layers under DeepSpeed configs.

Arguments: precision=name of each case; a name may be a path without .json. Prints a JSON list each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
STEPS, WIDTH = 4, 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build(name: str, precision: str) -> Any:
    """Return DeepSpeed's engine for a shipped config."""
    config = RunConfig()
    config.train.precision, config.train.accumulation = precision, 1
    config.train.learning_rate = 1e-2
    world_size = dist.get_world_size()
    resolved = resolve_ds_config(
        load_ds_config(DS_CONFIGS / f"{name}.json"), config, world_size=world_size
    )
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    model = nn.Sequential(layers[0], layers[1], nn.Tanh(), layers[2])
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=resolved,
        dist_init_required=False,
    )
    return engine


def train(engine: Any, precision: str) -> dict[str, Any]:
    """Return the optimizer's class and the losses of a few steps on a fixed batch."""
    x, losses = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH), []
    for _ in range(STEPS):
        loss = engine(x.to(DTYPES[precision])).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"optimizer": type(engine.optimizer).__name__, "losses": losses}


def main() -> None:
    start_ranks(Ranks.from_environment())
    for case in sys.argv[1:]:
        precision, _, name = case.partition("=")
        print(json.dumps([name, precision, train(build(name, precision), precision)]))


if __name__ == "__main__":
    main()
    stop_ranks()
