"""A run that reads a stream: it logs the rows that it consumes and saves its state regularly.

python streaming_run.py SOURCE FOLDER STEPS SAVE_EVERY PAUSE_AT

After the row PAUSE_AT it waits to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.loader import open_loader


def main(source: str, folder: Path, steps: int, save_every: int, pause_at: int) -> None:
    config = DataConfig(source=source, seq_len=16, held_out=0.2, timeout=30)
    checkpoint, log = folder / "saved.json", folder / "rows.txt"
    saved = {"step": 0, "bytes": 0, "loader": None}
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
    loader = open_loader(
        open_dataset(config),
        rank=1,
        world_size=2,
        micro_batch=2,
        accumulation=1,
        seed=3,
        consumed=saved["step"] * 4,
        state=saved["loader"],
    )
    with log.open("a") as rows:
        rows.truncate(saved["bytes"])  # steps after the checkpoint are lost
        for step in range(saved["step"] + 1, steps + 1):
            rows.write(f"{loader.next_batch().input_ids.tolist()}\n")
            rows.flush()
            if step % save_every == 0:
                state = {"step": step, "bytes": log.stat().st_size, "loader": loader.state()}
                (folder / "draft.json").write_text(json.dumps(state))
                os.replace(folder / "draft.json", checkpoint)
            if step == pause_at:
                time.sleep(60)
    loader.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
