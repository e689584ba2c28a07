"""Runs on two ranks: what DeepSpeed's engine allocates in one step, config by config.

Each argument is a config's name and a way of checkpointing, and gives one line of JSON: the bytes
in use between steps, and the most within the step.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

from nsa.engine.build import build_model, initialise
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.ranks import Ranks, start_ranks, stop_ranks
from tests.plan.allocations import Allocations, live_bytes
from tests.plan.toys import BUCKET, toy

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"


def step(config: RunConfig, engine: torch.nn.Module) -> None:
    shape = config.train.micro_batch, config.data.seq_len
    for _ in range(config.train.accumulation):
        ids = torch.randint(config.model.vocab_size, shape)
        engine.backward(engine(ids, labels=ids))
        engine.step()


def measured(name: str, checkpointing: str) -> dict[str, int]:
    config = toy(checkpointing)
    raw = load_ds_config(DS_CONFIGS / f"{name}.json")
    resolved = resolve_ds_config(raw, config, world_size=2)
    zero = resolved["zero_optimization"]
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
        if key in zero:
            zero[key] = BUCKET
    gc.collect()
    before = live_bytes()
    seen = Allocations()
    with seen.watching():
        engine = initialise(build_model(config, torch.device("cpu")), config, resolved)
        step(config, engine)
        gc.collect()
        between = live_bytes() - before
        with seen.span("step"):
            step(config, engine)
        engine.destroy()
        del engine
        gc.collect()
    return {"between": between, "most": between + seen.most["step"]}


def main() -> None:
    ranks = Ranks.from_environment()
    start_ranks(ranks)
    for case in sys.argv[1:]:
        name, checkpointing = case.split(":")
        print(json.dumps({"case": [name, checkpointing], **measured(name, checkpointing)}))


if __name__ == "__main__":
    main()
    stop_ranks()
