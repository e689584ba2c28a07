"""Records and helpers of the telemetry tests."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from typing import Any

from nsa.constants import BRANCHES
from nsa.monitor.observer import BackgroundWriter, LayerStatistics, StepRecord
from tests.ranks import PATIENCE


def make_record(step: int, **changes: Any) -> StepRecord:
    """Return a logged step with values that need full float64 precision."""
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


def make_layers(layers: int = 2, **changes: Any) -> list[LayerStatistics]:
    """Return the statistics of layers with different gates."""
    return [make_layer(index, **changes) for index in range(layers)]


def make_layer(index: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for place, branch in enumerate(BRANCHES):
        values[f"gate_{branch}"] = (index + place) / 8
        values[f"gate_{branch}_std"] = 1 / 3
    values |= {"choosing": 0.75, "entropy": 0.5 + index / 16}
    values |= {"overlap": 0.875, "distance": 6.5}
    return {**values, **changes}


# Statistics of a layer whose queries all read every block.
NO_FREE_BLOCKS: dict[str, Any] = dict.fromkeys(("entropy", "overlap", "distance"))


def drain(writer: BackgroundWriter) -> None:
    """Wait until all submitted jobs have run."""
    done = threading.Event()
    assert writer.submit(done.set)
    assert done.wait(PATIENCE)


@contextlib.contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """Simulate a full disk: no file of this process grows past `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
