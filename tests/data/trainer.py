"""A run that trains on a stream: it logs the rows it was given, and saves its place now and then.

python trainer.py SOURCE FOLDER STEPS SAVE_EVERY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from nsa.data.config import DataConfig
from nsa.data.loader import open_loader


def main(source: str, folder: Path, steps: int, save_every: int) -> None:
    config = DataConfig(
        source=source, seq_len=16, shuffle_documents=8, workers=2, held_out=0.2, timeout=30
    )
    saved, log = folder / "saved.json", folder / "rows.txt"
    at = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "bytes": 0, "feed": None}
    feed = open_loader(
        config,
        rank=1,
        world_size=2,
        micro_batch=2,
        accumulation=1,
        seed=3,
        consumed=at["step"] * 4,
        state=at["feed"],
    )
    with log.open("a") as rows:
        rows.truncate(at["bytes"])  # what was trained on since the checkpoint is lost with it
        for step in range(at["step"] + 1, steps + 1):
            rows.write(f"{feed.next_batch().input_ids.tolist()}\n")
            rows.flush()
            if step % save_every == 0:
                place = {"step": step, "bytes": log.stat().st_size, "feed": feed.state()}
                (folder / "draft.json").write_text(json.dumps(place))
                os.replace(folder / "draft.json", saved)
    feed.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
