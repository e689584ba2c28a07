"""Worker of test_ds_config_engine.py: DeepSpeed's engine with a tiny stack of layers.

    steps      trains in bf16 and fp32 on one process, with the middle layer used once and twice
    once       trains in bf16 with the middle layer used once; a config may be a path without .json
    missing    takes a step in which one rank of two does not use the middle layer
    layout     whether the weights of each joint product of a language model lie side by side

Arguments: one of these, and names of configs. Prints one JSON list per case.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa.engine.build import initialise
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import LanguageModel, ModelConfig
from nsa.model.fused import are_adjacent

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
STEPS, WIDTH = 4, 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Stack(nn.Module):
    """Three layers; the middle one is used once, twice (two checkpoint segments), or never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, middle: str = "once") -> Tensor:
        first, second, third = self.layers
        x = first(x)
        for _ in range({"once": 1, "twice": 2, "never": 0}[middle]):
            x = checkpoint(lambda x: torch.tanh(second(x)), x, use_reentrant=True)
        return third(x).float().square().mean()


def build(name: str, precision: str) -> Any:
    """Return DeepSpeed's engine for a shipped config."""
    config = RunConfig()
    config.train.precision, config.train.accumulation = precision, 1
    config.train.learning_rate = 1e-2
    world_size = dist.get_world_size()
    resolved = resolve_ds_config(
        load_ds_config(DS_CONFIGS / f"{name}.json"), config, world_size=world_size
    )
    model = Stack()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=resolved,
        dist_init_required=False,
    )
    return engine


def step(engine: Any, precision: str, middle: str) -> float:
    """Take one step on a fixed batch and return its loss."""
    x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
    loss = engine(x.to(DTYPES[precision]), middle)
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(engine: Any, precision: str, middle: str) -> dict[str, Any]:
    """Return the optimizer's class and the losses of a few steps, or the error."""
    try:
        losses = [step(engine, precision, middle) for _ in range(STEPS)]
    except (AssertionError, AttributeError) as error:
        return {"optimizer": type(engine.optimizer).__name__, "error": str(error)}
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
    cases = {
        "once": [("bf16", "once")],
        "steps": list(product(("bf16", "fp32"), ("once", "twice"))),
    }
    if sys.argv[1] in cases:
        for name in sys.argv[2:]:
            for precision, middle in cases[sys.argv[1]]:
                engine = build(name, precision)
                print(json.dumps([name, precision, middle, train(engine, precision, middle)]))
    elif sys.argv[1] == "layout":
        for name in sys.argv[2:]:
            print(json.dumps([name, joint_products(name)]))
    else:
        for name in sys.argv[2:]:
            engine = build(name, "bf16")
            step(engine, "bf16", middle="never" if dist.get_rank() else "once")
            print(json.dumps([name, float(engine.get_global_grad_norm())]))


if __name__ == "__main__":
    main()
    stop_ranks()
