"""On one or two ranks: save checkpoints, and resume those of the other number of ranks."""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from nsa.checkpoint.saver import load_checkpoint
from nsa.checkpoint.state_file import read_state_file
from nsa.checkpoint.universal import needs_universal, to_universal
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from tests.checkpoint.toy import GROUPS, build, save_once, step, weights


def optimizer_state(engine: Any) -> list[torch.Tensor]:
    """Return each group's fp32 weights and moments, gathered from all ranks."""
    optimizer, vectors = engine.optimizer, []
    for group, parameters in zip(optimizer.optimizer.param_groups, GROUPS, strict=True):
        flat = group["params"][0]
        state = optimizer.optimizer.state[flat]
        size = sum(p.numel() for p in engine.module.parameters() if parameters(p))
        for mine in (flat.detach(), state["exp_avg"], state["exp_avg_sq"]):
            shards = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, mine)
            vectors.append(torch.cat(shards)[:size])  # without padding
    return vectors


def save(root: Path, stage: int) -> None:
    """Take four steps, save, take four more."""
    ranks = dist.get_world_size()
    engine = build(seed=1, stage=stage)
    for index in range(4):
        step(engine, index)
    save_once(engine, root / f"{stage}_from_{ranks}", 4, {"step": 4})
    record(root, f"{stage}_from_{ranks}", engine, stage)
    engine.destroy()


def resume(root: Path, stage: int) -> None:
    """Take the last four steps from the other number's checkpoint."""
    ranks, name = dist.get_world_size(), f"{stage}_from_{3 - dist.get_world_size()}"
    saved = read_state_file(root / name / "step00000004")
    if needs_universal(saved, ranks):
        if dist.get_rank() == 0:
            to_universal(saved)
        dist.barrier()
        saved = to_universal(saved)
    engine = build(seed=2, stage=stage)
    load_checkpoint(engine, saved)
    assert saved.train_state == {"step": 4}
    record(root, f"{name}_on_{ranks}", engine, stage)
    engine.destroy()


def record(root: Path, name: str, engine: Any, stage: int) -> None:
    """Save what the engine holds, and its next losses."""
    state = {"weights": weights(engine), "optimizer": optimizer_state(engine) if stage else []}
    losses = [step(engine, index) for index in range(4, 8)]
    if dist.get_rank() == 0:
        torch.save(state | {"losses": losses}, root / f"{name}.pt")


def main() -> None:
    root = Path(sys.argv[1])
    start_ranks(Ranks.from_environment())
    deepspeed.logger.setLevel("ERROR")
    for job in sys.argv[2:]:
        name, _, stages = job.partition("=")
        for stage in stages.split(","):
            {"save": save, "resume": resume}[name](root, int(stage))


if __name__ == "__main__":
    main()
    stop_ranks()
