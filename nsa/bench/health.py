"""`python -m nsa.bench health`: what watching gates and selection costs a training step.

Steps with and without it take turns, in pairs whose order changes, so that a slow minute of a
shared machine hits both alike; what is reported is the ratio within the pairs. On a CPU seconds are
those that processors have spent on it, which others at work there change least.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from nsa.bench.measure import environment
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.monitor.health import HealthRecorder
from nsa.spec import NSASpec

LOG_EVERY = 10  # the default of monitor.log_every
LIMIT = 0.01  # of the run's time, at that interval
DEMO_SPEC = NSASpec(16, 8, 32, 6, window=128)
DEMO = ModelConfig(320, 4, 256, 6, 1, 64, mlp_width=704, attention=AttentionConfig(spec=DEMO_SPEC))
CASES = {  # model, sequences and tokens of a micro-batch
    "demo": (DEMO, 2, 512),
    "one layer of M7C": (ModelConfig(vocab_size=320, layers=1), 1, 2_048),
}


class Stepper:
    """A model that takes training steps, heard or not."""

    def __init__(
        self, config: ModelConfig, batch: int, seq_len: int, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = LanguageModel(config).to(self._device, dtype)
        self._recorder = HealthRecorder(self._model.sparse_layers(), config.attention.spec)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._ids = torch.randint(config.vocab_size, (batch, seq_len), device=self._device)

    def step(self, heard: bool) -> float:
        """Take a step; the seconds that it took."""
        start = self._now()
        if heard:
            self._recorder.arm()
        self._model(self._ids, labels=self._ids.roll(-1, 1)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if heard:
            assert self._recorder.read() is not None
        return self._now() - start

    def _now(self) -> float:
        if self._device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def run(pairs: int = 40) -> dict[str, Any]:
    """Measure each model, print a line as it goes, return the raw figures."""
    clock = "wall" if torch.cuda.is_available() else "processor"
    result: dict[str, Any] = {
        "environment": environment(),
        "clock": clock,
        "log_every": LOG_EVERY,
        "models": {},
    }
    for name, (config, batch, seq_len) in CASES.items():
        stepper = Stepper(config, batch, seq_len)
        for heard in (False, True, False, True):
            stepper.step(heard)
        found = _ratios(stepper, pairs)
        result["models"][name] = {"batch": batch, "seq_len": seq_len, **found}
        low, middle, high = found["share_at_log_every"]
        print(
            f"{name:<18} {found['off_seconds'] * 1e3:.0f} ms a step; heard at every {LOG_EVERY}th, "
            f"{middle:+.2%} (quartiles {low:+.2%} and {high:+.2%} of {pairs} pairs)",
            flush=True,
        )
    result["failures"] = [
        f"{name}: health costs more than {LIMIT:.0%} of a run's time"
        for name, found in result["models"].items()
        if found["share_at_log_every"][1] > LIMIT
    ]
    return result


def _ratios(stepper: Stepper, pairs: int) -> dict[str, Any]:
    """Seconds without, and what a heard step takes in steps: quartiles over pairs."""
    off, ratios = [], []
    for pair in range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        seconds = {heard: stepper.step(heard) for heard in order}
        off.append(seconds[False])
        ratios.append(seconds[True] / seconds[False])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "off_seconds": statistics.median(off),
        "on_over_off": quartiles,
        "share_at_log_every": [(ratio - 1) / LOG_EVERY for ratio in quartiles],
        "ratios": ratios,
    }
