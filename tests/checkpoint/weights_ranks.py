"""On two ranks: save an engine of each ZeRO stage, and its weights as DeepSpeed gathers them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from tests.checkpoint.save_once import save_once
from tests.checkpoint.toy import build, step


def master_weights(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """Return the optimizer's fp32 weights by name."""
    named = dict(engine.module.named_parameters())
    if stage:
        return {name: safe_get_full_fp32_param(one).clone() for name, one in named.items()}
    pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
    masters = {
        id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)
    }
    return {name: masters[id(one)].detach().clone() for name, one in named.items()}


def main() -> None:
    root = Path(sys.argv[1])
    start_ranks(Ranks.from_environment())
    deepspeed.logger.setLevel("ERROR")
    for stage in (0, 1, 2, 3):
        engine = build(seed=1, stage=stage, width=31)  # odd: shards are padded
        for index in range(3):
            step(engine, index)
        save_once(engine, root / str(stage), 3, {"step": 3})
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=stage == 3):
            trained = {name: one.detach().clone() for name, one in parameters.items()}
        expected = {"trained": trained, "master": master_weights(engine, stage)}
        if dist.get_rank() == 0:
            torch.save(expected, root / f"{stage}.pt")
        engine.destroy()


if __name__ == "__main__":
    main()
    stop_ranks()
