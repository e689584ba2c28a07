"""On two ranks: save an engine and under every failure; print the results."""

import json
import random
import resource
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from nsa.checkpoint.commit import newest_valid
from nsa.checkpoint.saver import CheckpointConfig, SaveFailed, Saver, capture, load_checkpoint
from nsa.checkpoint.state_file import read_state_file
from nsa.engine.process_group import CpuCollectives, Ranks, start_ranks, stop_ranks
from tests.checkpoint.toy import build, step, weights

OWN = {"betas": (0.5, 0.5), "eps": 1.0, "weight_decay": 2.0, "decay": 3.0, "lr_factor": 4.0}
ATTACHMENTS = {"config.yaml": "train: {}\n", "ds_config.json": "{}\n"}


class Trial:
    """One engine, and the outcomes of its saves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rank = dist.get_rank()
        self.collectives = CpuCollectives(60)
        self.engine = build(seed=1)

    def saver(self, folder: Path, **config: Any) -> Saver:
        return Saver(
            self.engine,
            folder,
            CheckpointConfig(**config),
            barrier=self.collectives.barrier,
            attachments=ATTACHMENTS,
        )

    def attempt(self, saver: Saver, folder: Path, number: int) -> dict[str, Any]:
        """Save; return what it raised, and what is on disk once all ranks are done."""
        error = None
        try:
            saver.save(number, {"step": number})
        except SaveFailed as raised:
            error = str(raised)
        dist.barrier()
        best, notes = newest_valid(folder)
        left = sorted(path.name for path in folder.iterdir())
        latest = (folder / "latest").read_text()
        dist.barrier()
        newest = best and best.name
        return {"error": error, "left": left, "newest": newest, "notes": notes, "latest": latest}


def two_steps(trial: Trial) -> dict[str, Any]:
    """Save steps 3 and 6."""
    saver, saved = trial.saver(trial.root / "run"), []
    for number in (3, 6):
        for index in range(number - 3, number):
            step(trial.engine, index)
        seed(trial.rank)
        saved.append(saver.save(number, {"step": number}).name)
    own = {weight.data_ptr() for weight in trial.engine.module.parameters()}
    files = capture(trial.engine, trial.root / "unused")
    weights_of = [content["module"] for content in files.values() if "module" in content]  # rank 0
    copied = [name for one in weights_of for name, x in one.items() if x.data_ptr() not in own]
    return {"saved": saved, "copied": copied}


def resume(trial: Trial) -> dict[str, Any]:
    """Compare random numbers, weights and settings after loading with those before it."""
    continued = weights(trial.engine)
    seed(90)  # loading must undo this
    saved = read_state_file(trial.root / "run/step00000003")
    load_checkpoint(trial.engine, saved)
    assert saved.train_state == {"step": 3}
    drawn = draw()
    seed(trial.rank)
    expected = draw()
    for index in range(3, 6):
        step(trial.engine, index)
    same = torch.equal(weights(trial.engine), continued)
    optimizer = trial.engine.optimizer
    optimizer.clip_grad = 0.125
    for group in optimizer.param_groups:
        group |= OWN
    load_checkpoint(trial.engine, saved)
    kept = optimizer.clip_grad == 0.125
    kept &= all(group.items() >= OWN.items() for group in optimizer.param_groups)
    return {"same": same, "drawn": drawn, "expected": expected, "kept": kept}


def seed(rank: int) -> None:
    torch.manual_seed(5 + rank)
    np.random.seed(6 + rank)
    random.seed(7 + rank)


def draw() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def one_rank_fails(trial: Trial) -> dict[str, Any]:
    """Rank 1 can write no file above 100 bytes; later rank 0 cannot remove old checkpoints."""
    folder = trial.root / "one_rank"
    saver = trial.saver(folder, keep=1)
    trial.attempt(saver, folder, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trial.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    failed = trial.attempt(saver, folder, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    then = trial.attempt(saver, folder, 3)
    with patch("nsa.checkpoint.saver.prune", side_effect=OSError("Stale file handle")):
        return failed | {"then": then, "unpruned": trial.attempt(saver, folder, 4)}


def main() -> None:
    start_ranks(Ranks.from_environment())
    deepspeed.logger.setLevel("ERROR")
    trial = Trial(Path(sys.argv[1]))
    for attempt in (two_steps, resume, one_rank_fails):
        print(json.dumps({"name": attempt.__name__} | attempt(trial)), flush=True)


if __name__ == "__main__":
    main()
    stop_ranks()
