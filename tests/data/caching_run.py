"""A run that reads a cache: it logs the samples of its rank and saves its step regularly.

python caching_run.py SOURCE FOLDER STEPS PAUSE_AT RANK WORLD_SIZE

After the step PAUSE_AT it waits to be killed.
"""

import json
import os
import sys
import time
from pathlib import Path

from nsa.data.cache import TokenCache
from nsa.data.dataset import DividedSource, open_dataset
from tests.data.texts import configure

SAVE_EVERY = 7


def main(source: str, folder: Path, steps: int, pause_at: int, rank: int, world_size: int) -> None:
    DividedSource.is_small = False  # type: ignore[assignment,method-assign]
    checkpoint, log = folder / "saved.json", folder / "rows.txt"
    saved = {"step": 0, "bytes": 0}
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
    cache = TokenCache(open_dataset(configure(source)), folder / "cache")
    cache.start({"train": steps * 4})
    shape = {"rank": rank, "world_size": world_size, "micro_batch": 4 // world_size}
    samples = cache.open_samples("train", 3)
    with log.open("a") as rows:
        rows.truncate(saved["bytes"])  # steps after the checkpoint are lost
        for step in range(saved["step"] + 1, steps + 1):
            (batch,) = samples.step((step - 1) * 4, **shape)
            rows.write(f"{batch.input_ids.tolist()}\n")
            rows.flush()
            if step % SAVE_EVERY == 0:
                state = {"step": step, "bytes": log.stat().st_size}
                (folder / "draft.json").write_text(json.dumps(state))
                os.replace(folder / "draft.json", checkpoint)
            if step == pause_at:
                time.sleep(600)
    cache.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
