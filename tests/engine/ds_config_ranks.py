"""Worker of test_ds_config_engine.py: DeepSpeed's engine with a tiny stack of layers.

    bf16,fp32  trains in these precisions on one process; a config may be a path without .json
    layout     whether the weights of each joint product of a language model lie side by side

Arguments: one of these, and names of configs. Prints one JSON list per case.
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

from nsa.engine.build import initialise
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import LanguageModel, ModelConfig
from nsa.model.fused import are_adjacent

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


def joint_products(name: str) -> list[bool]:
    """Per product of several weights of a language model: whether they are one view of memory."""
    config = RunConfig(model=ModelConfig(vocab_size=32, layers=2, width=16, heads=4, kv_heads=2))
    config.train.accumulation = 1
    resolved = resolve_ds_config(load_ds_config(DS_CONFIGS / f"{name}.json"), config, world_size=2)
    engine = initialise(LanguageModel(config.model), config, resolved)
    tokens = torch.arange(40)[None] % 32
    engine.backward(engine(tokens, labels=tokens))
    engine.step()
    products = []
    for block in engine.module.blocks:
        attention, mlp = block.attention, block.mlp
        products += [[attention.q, attention.k, attention.v, attention.gates], [mlp.gate, mlp.up]]
    weights = [[linear.weight for linear in linears] for linears in products]
    return [are_adjacent(x, -(-sum(map(len, x)) // 8) * 8) for x in weights]


def main() -> None:
    start_ranks(Ranks.from_environment())
    for name in sys.argv[2:]:
        if sys.argv[1] == "layout":
            print(json.dumps([name, joint_products(name)]))
            continue
        for precision in sys.argv[1].split(","):
            print(json.dumps([name, precision, train(build(name, precision), precision)]))


if __name__ == "__main__":
    main()
    stop_ranks()
