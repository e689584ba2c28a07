"""One rank: a step of each DeepSpeed config with and without the dtype report."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from nsa.engine.build import initialise
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import LanguageModel
from nsa.monitor.environment import DtypeReport
from tests.engine.small import small

CONFIGS = Path(__file__).parents[2] / "ds_configs"


def steps(name: str, report: Path | None) -> list[float]:
    """Return the losses of three steps; write the dtypes of the first to `report`."""
    config = small("reentrant")
    source = CONFIGS / f"{name}.json"
    resolved = resolve_ds_config(load_ds_config(source), config, world_size=1, source=source.name)
    torch.manual_seed(0)
    engine = initialise(LanguageModel(config.model), config, resolved)
    dtypes = DtypeReport(engine.module) if report else None
    losses = []
    for index in range(3):
        for micro in range(config.train.accumulation):
            generator = torch.Generator().manual_seed(10 * index + micro)
            ids = torch.randint(256, (1, 40), generator=generator)
            loss = engine(ids, labels=ids)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        if dtypes and report and index == 0:
            dtypes.write(report, engine.optimizer)
    engine.destroy()
    return losses


def main(folder: Path, names: list[str]) -> None:
    start_ranks(Ranks.from_environment())
    for name in names:
        reported, alone = steps(name, folder / f"{name}.txt"), steps(name, None)
        print(name, "same" if reported == alone else f"{reported} is not {alone}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    stop_ranks()
