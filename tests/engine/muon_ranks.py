"""Runs on two ranks: a step of Muon on the small model, with rates at which bf16 shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from nsa import checkpoint
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from tests.checkpoint.save_once import save_once
from tests.engine.switching_ranks import build, step

LAYERS = 3  # 21 equal matrices: the two ranks divide one of them
RATE = 0.5  # of Muon, large against the rounding of weights to bf16


def main() -> None:
    folder = Path(sys.argv[1])
    start_ranks(Ranks.from_environment())
    engine = build("zero1_muon", seed=1, layers=LAYERS)
    for group in engine.optimizer.param_groups:
        if group["use_muon"]:
            group["lr"], group["weight_decay"] = RATE, 0.0
    before = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    step(engine, 0)
    for name, parameter in engine.module.named_parameters():
        update = (before[name] - parameter.detach().float()) / RATE
        if update.dim() == 2:
            rows, columns = update.shape
            values = torch.linalg.svdvals(update) / max(1, rows / columns) ** 0.5
            row = {"name": name, "low": values.min().item(), "high": values.max().item()}
            print(json.dumps(row | {"sum": update.sum().item()}), flush=True)
    save_once(engine, folder, 1, {"step": 1})
    factors = [group.get("lr_factor") for group in engine.optimizer.param_groups]
    engine.destroy()
    other = build("zero1_muon", seed=2, layers=LAYERS)
    for group in other.optimizer.param_groups:
        group.pop("lr_factor", None)
    checkpoint.load(other, checkpoint.read_state_file(folder / "step00000001"))
    assert [group.get("lr_factor") for group in other.optimizer.param_groups] == factors
    dist.barrier()


if __name__ == "__main__":
    main()
    stop_ranks()
