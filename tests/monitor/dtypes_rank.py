"""One rank: a step of each DeepSpeed config with the dtype report listening, and one without."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from nsa.engine.build import initialise
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import LanguageModel
from nsa.monitor.dtypes import DtypeReport
from tests.engine.small import small

CONFIGS = Path(__file__).parents[2] / "ds_configs"


def steps(name: str, report: Path | None) -> list[float]:
    """The losses of three steps; the first one's dtypes go to `report`."""
    config = small("reentrant")
    source = CONFIGS / f"{name}.json"
    resolved = resolve_ds_config(load_ds_config(source), config, world_size=1, source=source.name)
    torch.manual_seed(0)
    engine = initialise(LanguageModel(config.model), config, resolved)
    listening = DtypeReport(engine.module) if report else None
    losses = []
    for index in range(3):
        for micro in range(config.train.accumulation):
            generator = torch.Generator().manual_seed(10 * index + micro)
            ids = torch.randint(256, (1, 40), generator=generator)
            loss = engine(ids, labels=ids)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        if listening and report and index == 0:
            listening.write(report, engine.optimizer)
    engine.destroy()
    return losses


def main(folder: Path, names: list[str]) -> None:
    start_ranks(Ranks.from_environment())
    for name in names:
        heard, alone = steps(name, folder / f"{name}.txt"), steps(name, None)
        print(name, "same" if heard == alone else f"{heard} is not {alone}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    stop_ranks()
