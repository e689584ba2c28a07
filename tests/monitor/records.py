"""Records and helpers that the monitor's tests share."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa.monitor.observer import (
    BRANCHES,
    DISTANCES,
    GATE_BINS,
    Health,
    LayerHealth,
    RunInfo,
    StepRecord,
)
from nsa.monitor.writer import BackgroundWriter

PATIENCE = 60.0  # seconds after which a wait that should end at once has failed


def make_info(run_dir: Path, **changes: Any) -> RunInfo:
    """A run that is about to start."""
    values: dict[str, Any] = {"name": "m7c", "profile": "demo", "total_steps": 300}
    return RunInfo(run_dir=run_dir, **{**values, **changes})


def make_record(step: int, **changes: Any) -> StepRecord:
    """A logged step with figures that no float32 and no short decimal can hold."""
    values: dict[str, Any] = {
        "tokens": 4096 * step,
        "loss": 5.0 / (step + 2),
        "lr": 1e-4 / 3,
        "grad_norm": 0.1 + 0.2,
        "tokens_per_s": 1e6 / 7,
        "memory_gb": 15.6 / 7,
        "seconds": 1 / 3,
    }
    return StepRecord(step=step, **{**values, **changes})


def make_health(layers: int = 2, **changes: Any) -> Health:
    """Layers that all differ; gates of a tenth, two tenths … and free picks near and far."""
    return Health([make_layer(index, **changes) for index in range(layers)])


def make_layer(index: int, **changes: Any) -> LayerHealth:
    values: dict[str, Any] = {
        "gate_mean": {branch: (index + place) / 8 for place, branch in enumerate(BRANCHES)},
        "gate_std": dict.fromkeys(BRANCHES, 1 / 3),
        "gate_saturated": dict.fromkeys(BRANCHES, 0.25),
        "gate_bins": dict.fromkeys(BRANCHES, [1 / GATE_BINS] * GATE_BINS),
        "choosing": 0.75,
        "forced": 0.1875,
        "entropy": 0.5 + index / 16,
        "overlap": 0.875,
        "distance": 6.5,
        "distances": [0.5, *[0.0] * (len(DISTANCES) - 2), 0.5],
    }
    return LayerHealth(**{**values, **changes})


def drain(writer: BackgroundWriter) -> None:
    """Wait until everything submitted so far has been tried."""
    done = threading.Event()
    assert writer.submit(done.set)
    assert done.wait(PATIENCE)


@contextlib.contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """A disk that is full for this process: no file grows past `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
