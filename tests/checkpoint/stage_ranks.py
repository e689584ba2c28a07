"""On two ranks, for each ZeRO stage: save an engine; plant code in copies and try to load them."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from nsa.checkpoint.saver import load_checkpoint
from nsa.checkpoint.state_file import read_state_file
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from tests.checkpoint.planted_code import KINDS, plant
from tests.checkpoint.toy import build, save_once, step


def weights(engine: Any, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the trained weights and the optimizer's fp32 weights, as DeepSpeed gathers them."""
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=stage == 3):
        trained = {name: one.detach().clone() for name, one in named.items()}
    if stage:
        master = {name: safe_get_full_fp32_param(one).clone() for name, one in named.items()}
        return {"trained": trained, "master": master}
    pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
    masters = {
        id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)
    }
    master = {name: masters[id(one)].detach().clone() for name, one in named.items()}
    return {"trained": trained, "master": master}


def main() -> None:
    root, errors = Path(sys.argv[1]), {}
    start_ranks(Ranks.from_environment())
    deepspeed.logger.setLevel("ERROR")
    for stage in (0, 1, 2, 3):
        engine = build(seed=1, stage=stage, width=31)  # odd: shards are padded
        for index in range(3):
            step(engine, index)
        saved = root / str(stage)
        save_once(engine, saved, 3, {"step": 3})
        expected = weights(engine, stage)
        if dist.get_rank() == 0:
            torch.save(expected, root / f"{stage}.pt")
        for kind in KINDS:
            attacked = root / f"{stage}_{kind}"
            if dist.get_rank() == 0:
                shutil.copytree(saved, attacked)
                planted = plant(attacked / "step00000003", kind, root / "ran")
                (attacked / "planted").write_text(str(planted))
            dist.barrier()
            if not int((attacked / "planted").read_text()):
                continue
            try:
                load_checkpoint(engine, read_state_file(attacked / "step00000003"))
                errors[attacked.name] = ""
            except ValueError as error:
                errors[attacked.name] = str(error)
            dist.barrier()
        engine.destroy()
    (root / f"errors{dist.get_rank()}.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main()
    stop_ranks()
