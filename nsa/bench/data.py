"""`python -m nsa.bench data`: how fast text becomes batches, and what that costs a step."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nsa.bench.gpu import hardware, pick_device
from nsa.bench.measure import environment, side_by_side
from nsa.bench.train import Trainer
from nsa.data.builtin import embedded
from nsa.data.config import DataConfig
from nsa.data.loader import BatchLoader, open_loader
from nsa.data.prepare import prepare
from nsa.data.tokenizer import build_tokenizer, train_tokenizer
from nsa.model import AttentionConfig, ModelConfig
from nsa.spec import NSASpec

SEQ_LEN = 2_048
GOALS = {"prepared tokens/s": 5e6, "byte tokenising MB/s": 50.0, "share of a step": 0.01}


def run(megabytes: int = 64, seconds: float = 3.0, rounds: int = 8) -> dict[str, Any]:
    """Measure everything on text of that size, print it, return the raw figures."""
    device = pick_device("auto")
    result: dict[str, Any] = {
        "environment": {**environment(), "hardware": hardware(device)},
        "goals": GOALS,
        "seq_len": SEQ_LEN,
    }
    with tempfile.TemporaryDirectory() as folder:
        text = _write_text(Path(folder), megabytes)
        shards = Path(folder) / "shards"
        start = time.perf_counter()
        prepare(DataConfig(source=str(text), tokenizer="byte"), shards, progress=False)
        taken = time.perf_counter() - start
        result["prepare_mb_per_s"] = text.stat().st_size / taken / 1e6
        result["tokenise_mb_per_s"] = _tokenising(Path(folder), seconds)
        result["tokens_per_s"] = {
            name: _feeding(source, seconds)
            for name, source in (("prepared", shards), ("streamed", text))
        }
        result["step"] = _step(str(shards), device, rounds)
    result["agreement_us"] = _agreement()
    _report(result)
    return result


def _write_text(folder: Path, megabytes: int) -> Path:
    """The standard library again and again, no two documents alike, as lines of JSON."""
    documents = [document.text.decode(errors="replace") for document in embedded().read()]
    path = folder / "text.jsonl"
    left, turn = megabytes * 10**6, 0
    with path.open("w") as file:
        while left > 0:
            for number, text in enumerate(documents):
                left -= file.write(json.dumps({"text": f"# {turn} {number}\n{text}"}) + "\n")
                if left <= 0:
                    break
            turn += 1
    return path


def _rate(work: Callable[[], int], seconds: float) -> float:
    """Units a second over at least so many seconds."""
    work()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += work()
    return done / (time.perf_counter() - start)


def _tokenising(folder: Path, seconds: float) -> dict[str, float]:
    texts = [document.text for document in embedded().part(0, 8).read()]
    size = sum(map(len, texts))
    train_tokenizer(embedded().part(1, 8), 4_096, folder / "bpe")
    found = {}
    for name in ("byte", f"hf:{folder / 'bpe'}"):
        tokenizer = build_tokenizer(DataConfig(tokenizer=name))

        def tokenise(encode: Callable[[list[bytes]], object] = tokenizer.encode_many) -> int:
            encode(texts)
            return size

        found["byte" if name == "byte" else "bpe"] = _rate(tokenise, seconds) / 1e6
    return found


def _feeding(source: Path, seconds: float) -> dict[str, float]:
    found = {}
    for micro_batch in (1, 8):
        feed = _feed(str(source), micro_batch)

        def take(feed: BatchLoader = feed) -> int:
            return feed.next_batch().tokens

        found[str(micro_batch)] = _rate(take, seconds)
        feed.close()
    return found


def _feed(source: str, micro_batch: int, seq_len: int = SEQ_LEN) -> BatchLoader:
    config = DataConfig(source=source, seq_len=seq_len)
    return open_loader(
        config, rank=0, world_size=1, micro_batch=micro_batch, accumulation=1, seed=0
    )


def _step(source: str, device: torch.device, rounds: int) -> dict[str, float]:
    """A step on batches from the feed and one on a batch that is always the same, in turns."""
    on_gpu = device.type == "cuda"
    config = ModelConfig() if on_gpu else _small()
    seq_len = SEQ_LEN if on_gpu else 512
    micro_batch = 8 if on_gpu else 2
    dtype = torch.bfloat16 if on_gpu else torch.float32
    trainer = Trainer(config, device, dtype, compiled=False)
    feed = _feed(source, micro_batch, seq_len)
    constant = feed.next_batch().to(device)
    waited: list[float] = []

    def finish(batch: Any) -> None:
        trainer.step(batch.input_ids, batch.labels)
        if on_gpu:
            torch.cuda.synchronize()

    def fed() -> None:
        start = time.perf_counter()
        batch = feed.next_batch()
        waited.append(time.perf_counter() - start)
        finish((batch.pin_memory() if on_gpu else batch).to(device, non_blocking=True))

    found = side_by_side({"fed": fed, "constant": lambda: finish(constant)}, rounds)
    feed.close()
    found["waited"] = sorted(waited)[len(waited) // 2]
    return found | {"fed_over_constant": found["fed"] / found["constant"]}


def _small() -> ModelConfig:
    spec = NSASpec(block_len=16, block_stride=8, select_len=32, select_top=6, window=128)
    return ModelConfig(
        vocab_size=320,
        layers=4,
        width=256,
        heads=6,
        kv_heads=1,
        mlp_width=704,
        attention=AttentionConfig(spec=spec),
    )


def _agreement(meetings: int = 500) -> float:
    """Microseconds of the collective by which two ranks learn that both have data."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_meet, args=(folder, meetings), nprocs=2)
        return float(Path(folder, "us").read_text())


def _meet(rank: int, folder: str, meetings: int) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timedelta(minutes=1), world_size=2, rank=rank)
    flag = torch.zeros((), dtype=torch.int32)
    for _ in range(20):
        dist.all_reduce(flag)
    start = time.perf_counter()
    for _ in range(meetings):
        dist.all_reduce(flag)
    if rank == 0:
        taken = (time.perf_counter() - start) / meetings
        Path(folder, "us").write_text(str(taken * 1e6))
    dist.barrier()
    dist.destroy_process_group()


def _report(result: dict[str, Any]) -> None:
    print(f"prepare (byte, all cores)       {result['prepare_mb_per_s']:.0f} MB/s of text")
    for name, rate in result["tokenise_mb_per_s"].items():
        print(f"tokenise {name:4}                   {rate:,.1f} MB/s")
    for name, rates in result["tokens_per_s"].items():
        for micro_batch, rate in rates.items():
            print(f"{name}, {micro_batch} × {SEQ_LEN}{'':14}{rate / 1e6:,.1f} M tokens/s a process")
    step = result["step"]
    print(
        f"a step on fed batches           {step['fed'] * 1e3:,.1f} ms, on one that stays "
        f"{step['constant'] * 1e3:,.1f} ms: {step['fed_over_constant']:.3f} times; waited for a "
        f"batch {step['waited'] * 1e6:,.0f} us, {step['waited'] / step['constant']:.3%} of a step"
    )
    print(f"two ranks agree                 {result['agreement_us']:,.0f} us a step")
