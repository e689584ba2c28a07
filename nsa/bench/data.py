"""`python -m nsa.bench data`: tokenising and loading speed, and what data costs a training step."""

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

import torch

from nsa.bench.recipe import recipe_config
from nsa.bench.results import pick_device, print_figures
from nsa.bench.timing import median_seconds
from nsa.bench.train import Stepper
from nsa.data.builtin import embedded
from nsa.data.config import DataConfig
from nsa.data.loader import BatchLoader, open_loader
from nsa.data.prepare import prepare
from nsa.data.tokenizer import build_tokenizer, train_tokenizer
from nsa.model import ModelConfig

SEQ_LEN = 2_048
GOALS = {"prepared tokens/s": 5e6, "byte tokenising MB/s": 50.0, "fraction of a step": 0.01}
MEGABYTES = 64  # of text to prepare
SECONDS = 3.0  # for each rate
ROUNDS = 8  # steps on loaded and on constant batches


def run(_: object) -> dict[str, Any]:
    """Measure on generated text and print."""
    result: dict[str, Any] = {"goals": GOALS, "seq_len": SEQ_LEN}
    with tempfile.TemporaryDirectory() as folder:
        text, shards = _write_text(Path(folder, "text.jsonl")), Path(folder, "shards")
        start = time.perf_counter()
        prepare(DataConfig(source=str(text), tokenizer="byte"), shards, progress=False)
        seconds = time.perf_counter() - start
        result["prepare_mb_per_s"] = text.stat().st_size / seconds / 1e6
        result["tokenise_mb_per_s"] = _tokenising(Path(folder))
        result["tokens_per_s"] = {
            name: _loading(source) for name, source in (("prepared", shards), ("streamed", text))
        }
        result["step"] = _step(str(shards), pick_device("auto"))
    print_figures(result)
    return result


def _write_text(path: Path) -> Path:
    """Write the embedded documents repeatedly as lines of JSON; no two lines are equal."""
    documents = [document.text.decode(errors="replace") for document in embedded().read()]
    with path.open("w") as file:
        for number, text in enumerate(itertools.cycle(documents)):
            file.write(json.dumps({"text": f"# {number}\n{text}"}) + "\n")
            if file.tell() > MEGABYTES * 10**6:
                break
    return path


def _rate(work: Callable[[], object], size: float) -> float:
    """Return units per second over SECONDS; a call of `work` processes `size` units."""
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
    rates = {}
    for micro_batch in (1, 8):
        with closing(_loader(str(source), micro_batch)) as loader:
            rates[str(micro_batch)] = _rate(loader.next_batch, micro_batch * SEQ_LEN)
    return rates


def _loader(source: str, micro_batch: int, seq_len: int = SEQ_LEN) -> BatchLoader:
    config = DataConfig(source=source, seq_len=seq_len)
    return open_loader(
        config, rank=0, world_size=1, micro_batch=micro_batch, accumulation=1, seed=0
    )


def _step(source: str, device: torch.device) -> dict[str, float]:
    """Time steps on loaded batches and on a constant batch, alternating."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        stepper = Stepper(ModelConfig(), device, torch.bfloat16)
        loader = _loader(source, 8)
    else:
        demo = recipe_config("demo")
        stepper = Stepper(demo.model, device, torch.float32)
        loader = _loader(source, demo.train.rows, demo.data.seq_len)
    constant = loader.next_batch().to(device)
    waits: list[float] = []

    def step(batch: Any) -> None:
        stepper.step(batch.input_ids, batch.labels)
        if on_gpu:
            torch.cuda.synchronize()

    def loaded_step() -> None:
        start = time.perf_counter()
        batch = loader.next_batch()
        waits.append(time.perf_counter() - start)
        step((batch.pin_memory() if on_gpu else batch).to(device, non_blocking=True))

    seconds = median_seconds({"loaded": loaded_step, "constant": lambda: step(constant)}, ROUNDS)
    loader.close()
    return seconds | {
        "waited": sorted(waits)[len(waits) // 2],
        "loaded_over_constant": seconds["loaded"] / seconds["constant"],
    }
