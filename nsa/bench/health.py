"""`python -m nsa.bench health`: what recording gates and selection costs a training step.

Steps with and without recording alternate, in pairs of changing order, so that a slow minute of a
shared machine affects both; the result is the ratio within pairs. On a CPU the clock is CPU time,
which other processes disturb least.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from nsa.bench.recipe import recipe_config
from nsa.bench.results import pick_device, print_figures
from nsa.bench.timing import synchronize
from nsa.bench.train import Stepper
from nsa.model import ModelConfig
from nsa.monitor.health import HealthRecorder

LOG_EVERY = 10  # the default of monitor.log_every
LIMIT = 0.01  # of a run's time, at that interval
PAIRS = 40  # steps with and without recording


def cases() -> dict[str, tuple[ModelConfig, int, int]]:
    """Return models, each with a micro-batch's sequences and tokens per sequence."""
    demo = recipe_config("demo")
    return {
        "demo": (demo.model, demo.train.rows, demo.data.seq_len),
        "one layer of M7C": (ModelConfig(vocab_size=320, layers=1), 1, 2_048),
    }


def run(_: object) -> dict[str, Any]:
    """Measure each model and print a line each; recording fails above LIMIT."""
    result: dict[str, Any] = {
        "clock": "wall" if torch.cuda.is_available() else "processor",
        "log_every": LOG_EVERY,
        "models": {},
        "failures": [],
    }
    for name, (config, batch, seq_len) in cases().items():
        figures = _measure(config, batch, seq_len)
        result["models"][name] = {"batch": batch, "seq_len": seq_len, **figures}
        print_figures(figures, f"{name}.")
        if figures["fraction_at_log_every"]["median"] > LIMIT:
            failure = f"{name}: recording costs more than {LIMIT:.0%} of a run's time"
            result["failures"].append(failure)
    return result


def _measure(config: ModelConfig, batch: int, seq_len: int) -> dict[str, Any]:
    """Return the seconds without recording, and quartiles of the ratio over pairs."""
    device = pick_device("auto")
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    stepper = Stepper(config, device, torch.float32)
    recorder = HealthRecorder(stepper.model.sparse_layers(), config.attention.spec)
    ids = torch.randint(config.vocab_size, (batch, seq_len), device=device)

    def step(record: bool) -> float:
        """Take a step and return its seconds."""
        synchronize(device)
        start = clock()
        if record:
            recorder.arm()
        stepper.step(ids, ids.roll(-1, 1))
        if record:
            assert recorder.read() is not None
        synchronize(device)
        return clock() - start

    for record in (False, True, False, True):
        step(record)
    off, ratios = [], []
    for pair in range(PAIRS):
        order = (False, True) if pair % 2 else (True, False)
        seconds = {record: step(record) for record in order}
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
