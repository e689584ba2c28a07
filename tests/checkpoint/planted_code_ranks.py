"""On two ranks: save an engine of each ZeRO stage; plant code in a file; try to load it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist

from nsa import checkpoint
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from tests.checkpoint.planted_code import KINDS, plant
from tests.checkpoint.save_once import save_once
from tests.checkpoint.toy import build, step


def main() -> None:
    root, errors = Path(sys.argv[1]), {}
    start_ranks(Ranks.from_environment())
    deepspeed.logger.setLevel("ERROR")
    for stage in (0, 1, 2, 3):
        engine = build(seed=1, stage=stage)
        step(engine, 0)
        saved = root / str(stage)
        save_once(engine, saved, 3, {"step": 3})
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
                checkpoint.load(engine, checkpoint.read_state_file(attacked / "step00000003"))
                errors[attacked.name] = ""
            except ValueError as error:
                errors[attacked.name] = str(error)
            dist.barrier()
        engine.destroy()
    (root / f"errors{dist.get_rank()}.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main()
    stop_ranks()
