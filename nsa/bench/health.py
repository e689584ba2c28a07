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

from nsa.bench.results import pick_device, print_figures
from nsa.bench.train import Stepper
from nsa.model import AttentionConfig, ModelConfig
from nsa.monitor.health import HealthRecorder
from nsa.spec import NSASpec

LOG_EVERY = 10  # the default of monitor.log_every
LIMIT = 0.01  # of a run's time, at that interval
PAIRS = 40  # steps with and without recording
DEMO_SPEC = NSASpec(16, 8, 32, 6, window=128)
DEMO = ModelConfig(320, 4, 256, 6, 1, 64, mlp_width=704, attention=AttentionConfig(spec=DEMO_SPEC))
CASES = {  # model, sequences and tokens of a micro-batch
    "demo": (DEMO, 2, 512),
    "one layer of M7C": (ModelConfig(vocab_size=320, layers=1), 1, 2_048),
}


class TimedModel:
    """Training steps of a model, timed, with and without recording."""

    def __init__(
        self, config: ModelConfig, batch: int, seq_len: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.tokens, device = batch * seq_len, pick_device("auto")
        self._stepper = Stepper(config, device, dtype)
        layers = self._stepper.model.sparse_layers()
        self._recorder = HealthRecorder(layers, config.attention.spec)
        self._ids = torch.randint(config.vocab_size, (batch, seq_len), device=device)

    def step(self, record: bool) -> float:
        """Take a step and return its seconds."""
        start = self._now()
        if record:
            self._recorder.arm()
        self._stepper.step(self._ids, self._ids.roll(-1, 1))
        if record:
            assert self._recorder.read() is not None
        return self._now() - start

    def _now(self) -> float:
        if self._ids.is_cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


def run(_: object) -> dict[str, Any]:
    """Measure each model and print a line each; recording fails above LIMIT."""
    result: dict[str, Any] = {
        "clock": "wall" if torch.cuda.is_available() else "processor",
        "log_every": LOG_EVERY,
        "models": {},
        "failures": [],
    }
    for name, (config, batch, seq_len) in CASES.items():
        figures = _measure(TimedModel(config, batch, seq_len))
        result["models"][name] = {"batch": batch, "seq_len": seq_len, **figures}
        print_figures(figures, f"{name}.")
        if figures["fraction_at_log_every"]["median"] > LIMIT:
            failure = f"{name}: recording costs more than {LIMIT:.0%} of a run's time"
            result["failures"].append(failure)
    return result


def _measure(model: TimedModel) -> dict[str, Any]:
    """Seconds without recording, and quartiles of the ratio over pairs."""
    for record in (False, True, False, True):
        model.step(record)
    off, ratios = [], []
    for pair in range(PAIRS):
        order = (False, True) if pair % 2 else (True, False)
        seconds = {record: model.step(record) for record in order}
        off.append(seconds[False])
        ratios.append(seconds[True] / seconds[False])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "off_seconds": statistics.median(off),
        "on_over_off": quartiles,
        "fraction_at_log_every": {
            name: (ratio - 1) / LOG_EVERY
            for name, ratio in zip(("low", "median", "high"), quartiles, strict=True)
        },
        "ratios": ratios,
    }
