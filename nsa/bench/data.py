"""`python -m nsa.bench data`: speed of preparing, tokenising and loading generated text."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from nsa.bench.results import print_figures
from nsa.data.builtin import embedded
from nsa.data.config import DataConfig
from nsa.data.loader import open_loader
from nsa.data.prepare import prepare
from nsa.data.tokenizer import build_tokenizer, train_tokenizer

SEQ_LEN = 2_048
MEGABYTES = 64  # of text to prepare
SECONDS = 3.0  # for each rate


def run(_: object) -> dict[str, Any]:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        text, shards = _write_text(Path(folder, "text.jsonl")), Path(folder, "shards")
        start = time.perf_counter()
        prepare(DataConfig(source=str(text), tokenizer="byte"), shards, progress=False)
        seconds = time.perf_counter() - start
        result: dict[str, Any] = {
            "seq_len": SEQ_LEN,
            "prepare_mb_per_s": text.stat().st_size / seconds / 1e6,
            "tokenise_mb_per_s": _tokenising(Path(folder)),
            "tokens_per_s": {"prepared": _loading(shards), "streamed": _loading(text)},
        }
    print_figures(result)
    return result


def _write_text(path: Path) -> Path:
    """Repeat the embedded documents as lines of JSON; no two documents are equal."""
    documents = [document.text.decode(errors="replace") for document in embedded().read()]
    with path.open("w") as file:
        for number, text in enumerate(itertools.cycle(documents)):
            file.write(json.dumps({"text": f"# {number}\n{text}"}) + "\n")
            if file.tell() > MEGABYTES * 10**6:
                break
    return path


def _rate(work: Callable[[], object], size: float) -> float:
    """Units per second, over at least SECONDS; a call of `work` does `size` of them."""
    work()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        work()
        calls += 1
    return calls * size / (time.perf_counter() - start)


def _tokenising(folder: Path) -> dict[str, float]:
    texts = [document.text for document in embedded().part(0, 8).read()]
    train_tokenizer(embedded().part(1, 8), 4_096, folder / "bpe")
    megabytes = sum(map(len, texts)) / 1e6
    encoders = {
        name: build_tokenizer(DataConfig(tokenizer=tokenizer)).encode_many
        for name, tokenizer in (("byte", "byte"), ("bpe", f"hf:{folder / 'bpe'}"))
    }
    return {name: _rate(partial(encode, texts), megabytes) for name, encode in encoders.items()}


def _loading(source: Path) -> dict[str, float]:
    """Tokens per second in batches of 1 and of 8 sequences."""
    config, rates = DataConfig(source=str(source), seq_len=SEQ_LEN), {}
    for micro_batch in (1, 8):
        batches = open_loader(
            config, rank=0, world_size=1, micro_batch=micro_batch, accumulation=1, seed=0
        )
        with closing(batches) as loader:
            rates[str(micro_batch)] = _rate(loader.next_batch, micro_batch * SEQ_LEN)
    return rates
