"""What parts of a run cost a CPU: attention and a layer, data, recording of layer health.

python -m tests.bench costs cpu       attention and a layer of M7C, forward and backward
python -m tests.bench costs data      tokenising, loading, and how long a step waits
python -m tests.bench costs health    recording gates and selection in a training step
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa.bench.baselines import sdpa
from nsa.bench.implementations import Implementation, Inputs
from nsa.bench.options import SHAPES
from nsa.bench.recipe import recipe_config
from nsa.bench.results import Report
from nsa.bench.timing import Step, time_alternating
from nsa.bench.train import Stepper
from nsa.data.builtin import embedded
from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.loader import BatchLoader, open_loader
from nsa.data.prepare import prepare
from nsa.data.tokenizer import build_tokenizer, train_tokenizer
from nsa.dtypes import DTYPES
from nsa.model import ModelConfig
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.block import Block
from nsa.monitor.health import HealthRecorder
from nsa.ops import NSASpec, nsa_attention

CPU, SHAPE = torch.device("cpu"), SHAPES["m7c"]
SEQ_LEN = 2_048
# cpu: one layer of the system that this one replaces, with its MLP, forward and backward, measured
# on two cores in fp32. Those cores reached 180 GFLOP/s in fp32 matrix products.
EARLIER_LAYER_SECONDS = 10.5
LENGTHS = (SEQ_LEN, 4_096, 8_192, 16_384)
ROUNDS = 5
# data
GOALS = {"prepared tokens/s": 5e6, "byte tokenising MB/s": 50.0, "fraction of a step": 0.01}
MEGABYTES = 64  # of text to prepare
SECONDS = 3.0  # for each rate
STEPS = 8  # on loaded batches
# health
LOG_EVERY = 10  # the default of monitor.log_every
LIMIT = 0.01  # of a run's time, at that interval
PAIRS = 40  # steps with and without recording


def cpu() -> dict[str, Any]:
    """Time blockwise attention relative to SDPA, per token by length, and a layer."""
    steps = {str(length): _nsa_step(_inputs(length, torch.float32)) for length in LENGTHS}
    per_token = {n: s / int(n) for n, s in median_seconds(steps, ROUNDS // 2).items()}
    result: dict[str, Any] = {
        "shape": {"heads": SHAPE.heads, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.key},
        "matrix_products_gflops": {},
        "attention": {},
        "length": {
            n: {"us_per_token": s * 1e6, "growth": s / per_token[str(LENGTHS[0])]}
            for n, s in per_token.items()
        },
        "layer": {},
    }
    for name in ("fp32", "bf16"):
        x, (a, b) = _inputs(SEQ_LEN, DTYPES[name]), torch.randn(2, SEQ_LEN, SEQ_LEN)
        steps = {
            "product": partial(torch.matmul, a.to(x.q.dtype), b.to(x.q.dtype)),
            "nsa": _nsa_step(x),
            "sdpa": sdpa("sdpa-flash", x, SHAPE).step,
            "layer": _layer_step(x.q.dtype),
        }
        product, nsa, dense, layer = median_seconds(steps, ROUNDS).values()
        result["matrix_products_gflops"][name] = 2 * SEQ_LEN**3 / product / 1e9
        result["attention"][name] = {"nsa": nsa, "sdpa": dense, "nsa_over_sdpa": nsa / dense}
        faster = EARLIER_LAYER_SECONDS / layer
        result["layer"][name] = {"seconds": layer, "times_faster": faster}
    return result


def median_seconds(steps: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Return each step's median wall time; raise if one fails."""
    timings, errors = time_alternating(steps, CPU, rounds=rounds)
    if errors:
        raise RuntimeError("; ".join(errors.values()))
    return {name: timing.median / 1e3 for name, timing in timings.items()}


def _inputs(seq_len: int, dtype: torch.dtype) -> Inputs:
    return Inputs.random(SHAPE, 1, seq_len, NSASpec(), CPU, dtype)


def _nsa_step(inputs: Inputs) -> Step:
    attention = partial(nsa_attention, spec=NSASpec(), backend="blockwise")
    return Implementation(attention, *inputs).step


def _layer_step(dtype: torch.dtype) -> Step:
    config = ModelConfig()
    block = Block(config).to(dtype)
    metadata = AttentionMetadata.build(config, SEQ_LEN, None, CPU)
    x, grad_output = torch.randn(2, 1, SEQ_LEN, config.width).to(dtype)
    x.requires_grad_()
    return lambda: torch.autograd.backward(
        block(x, None, metadata=metadata), [grad_output, grad_output]
    )


def data() -> dict[str, Any]:
    """Measure the rates of preparing, tokenising and loading, and a step's wait for its batch."""
    result: dict[str, Any] = {"goals": GOALS, "seq_len": SEQ_LEN}
    with tempfile.TemporaryDirectory() as folder:
        text, shards = _write_text(Path(folder, "text.jsonl")), Path(folder, "shards")
        start = time.perf_counter()
        prepare(DataConfig(source=str(text), tokenizer="byte"), shards, progress=False)
        seconds = time.perf_counter() - start
        result["prepare_mb_per_s"] = text.stat().st_size / seconds / 1e6
        result["tokenise_mb_per_s"] = _tokenising(Path(folder))
        result["tokens_per_s"] = {"prepared": _loading(shards), "streamed": _loading(text)}
        result["step"] = _waiting(shards)
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
    byte, bpe = (
        build_tokenizer(DataConfig(tokenizer=name)) for name in ("byte", f"hf:{folder / 'bpe'}")
    )
    return {
        "byte": _rate(partial(byte.encode_many, texts), megabytes),
        "bpe": _rate(partial(bpe.encode_many, texts), megabytes),
    }


def _loading(source: Path) -> dict[str, float]:
    rates = {}
    for micro_batch in (1, 8):
        with closing(_loader(source, micro_batch, SEQ_LEN)) as loader:
            rates[str(micro_batch)] = _rate(loader.next_batch, micro_batch * SEQ_LEN)
    return rates


def _loader(source: Path, micro_batch: int, seq_len: int) -> BatchLoader:
    config = DataConfig(source=str(source), seq_len=seq_len)
    return open_loader(
        open_dataset(config), rank=0, world_size=1, micro_batch=micro_batch, accumulation=1, seed=0
    )


def _waiting(shards: Path) -> dict[str, float]:
    """Return the seconds that a step of the demo waits for its batch, and those of the step."""
    demo, waits, steps = recipe_config("demo"), list[float](), list[float]()
    stepper = Stepper(demo.model, CPU, torch.float32)
    with closing(_loader(shards, demo.train.rows, demo.data.seq_len)) as loader:
        for _ in range(STEPS):
            start = time.perf_counter()
            batch = loader.next_batch()
            waits.append(time.perf_counter() - start)
            stepper.step(batch.input_ids, batch.labels)
            steps.append(time.perf_counter() - start)
    waited, step = statistics.median(waits), statistics.median(steps)
    return {"waited": waited, "loaded": step, "fraction": waited / step}


def health_cases() -> dict[str, tuple[ModelConfig, int, int]]:
    """Return models, each with a micro-batch's sequences and tokens per sequence."""
    demo = recipe_config("demo")
    return {
        "demo": (demo.model, demo.train.rows, demo.data.seq_len),
        "one layer of M7C": (ModelConfig(vocab_size=320, layers=1), 1, 2_048),
    }


def health() -> dict[str, Any]:
    """Compare steps with and without recording; recording fails above LIMIT."""
    models, failures = {}, []
    for name, (config, batch, seq_len) in health_cases().items():
        figures = _recording(config, batch, seq_len)
        models[name] = {"batch": batch, "seq_len": seq_len, **figures}
        if figures["fraction_at_log_every"]["median"] > LIMIT:
            failures.append(f"{name}: recording costs more than {LIMIT:.0%} of a run's time")
    return {"clock": "processor", "log_every": LOG_EVERY, "models": models, "failures": failures}


def _recording(config: ModelConfig, batch: int, seq_len: int) -> dict[str, Any]:
    """Return the seconds without recording, and quartiles of the ratio over pairs.

    Pairs change their order, so that a slow minute of a shared machine affects both; the clock is
    CPU time, which other processes disturb least.
    """
    stepper = Stepper(config, CPU, torch.float32)
    recorder = HealthRecorder(stepper.model.sparse_layers(), config.attention.spec)
    ids = torch.randint(config.vocab_size, (batch, seq_len))

    def step(record: bool) -> float:
        """Take a step and return its seconds."""
        start = time.process_time()
        if record:
            recorder.arm()
        stepper.step(ids, ids.roll(-1, 1))
        if record:
            assert recorder.read() is not None
        return time.process_time() - start

    for record in (False, True, False, True):
        step(record)
    off, ratios = [], []
    for pair in range(PAIRS):
        seconds = {record: step(record) for record in (pair % 2 == 0, pair % 2 == 1)}
        off.append(seconds[False])
        ratios.append(seconds[True] / seconds[False])
    low, median, high = statistics.quantiles(ratios, n=4)
    quartiles = {"low": low, "median": median, "high": high}
    return {
        "off_seconds": statistics.median(off),
        "on_over_off": [low, median, high],
        "fraction_at_log_every": {n: (ratio - 1) / LOG_EVERY for n, ratio in quartiles.items()},
        "ratios": ratios,
    }


MEASUREMENTS = {"cpu": cpu, "data": data, "health": health}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("measurement", choices=MEASUREMENTS)


def run(report: Report) -> dict[str, Any]:
    """Run one measurement and print its figures."""
    result = MEASUREMENTS[report.flags.measurement]()
    _print_figures(result)
    return result


def _print_figures(result: dict[str, Any], path: str = "") -> None:
    """Print every number of a nested result beside its dotted name."""
    for name, value in result.items():
        if isinstance(value, dict):
            _print_figures(value, f"{path}{name}.")
        elif isinstance(value, int | float):
            print(f"{path + name:<48} {value:,.4g}", flush=True)
