"""Jobs on Hugging Face datasets: `hub_jobs.py NAME JOBS` prints the result of each as JSON.

`datasets` reads the environment when it is imported, so test_hub.py starts a process for each.
"""

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from nsa.data.cache import TokenCache
from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.hub import Hub


def read(job: dict[str, Any]) -> dict[str, Any]:
    """Read the documents of a source."""
    texts, error = list[str](), None
    try:
        for document, _ in Hub(DataConfig(**job["config"]), job["name"]).read():
            texts.append(document.text.decode())
    except ValueError as refused:
        error = str(refused)
    return {"texts": texts, "error": error}


def resume(job: dict[str, Any]) -> dict[str, Any]:
    """Resume a pass after each of its documents, or after one far into a file."""
    from tests.data.texts import check_resumption, contents_of

    config = DataConfig(pattern=job["pattern"])
    source = Hub(config, job["name"])
    pairs = list(source.read())
    if job["row"] is not None:
        texts = contents_of(source, pairs[job["row"]][1])
    else:
        texts = check_resumption(source, 9)
        for number in range(62, 68):  # around the end of a block
            rest = contents_of(Hub(config, job["name"]), pairs[number][1])
            assert rest == [document.text for document, _ in pairs[number + 1 :]]
    return {"texts": [text.decode() for text in texts]}


def tokenise(job: dict[str, Any]) -> dict[str, Any]:
    """Read the first samples of a source by way of a cache of its tokens."""
    config = DataConfig(source=job["name"], seq_len=16, held_out=0.2, timeout=job["timeout"])
    count = job["samples"]
    try:
        with closing(TokenCache(open_dataset(config), Path(job["folder"]))) as cache:
            cache.start({"train": count})
            samples = cache.open_samples("train", 1)
            rows = samples.batch(range(count)).input_ids.tolist()
    except ValueError as error:
        return {"error": str(error)}
    return {"rows": rows, "fingerprint": samples.fingerprint}


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load a dataset without this package, as a user may have done before."""
    import datasets

    return {"rows": len(datasets.load_dataset(job["name"])["train"])}


JOBS = {job.__name__: job for job in (read, resume, tokenise, load)}

if __name__ == "__main__":
    for given in json.loads(sys.argv[2]):
        print(json.dumps(JOBS[sys.argv[1]](given)))
    sys.stdout.flush()
    os._exit(0)  # as a run ends: pyarrow's threads may outlive the interpreter
