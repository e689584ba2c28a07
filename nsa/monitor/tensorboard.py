"""TensorBoard and DeepSpeed's other trackers, written off the training thread.

All get scalars; W&B and Comet also the settings, TensorBoard histograms and texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from nsa.monitor.observer import (
    DISTANCES,
    GATE_BINS,
    TAGS,
    Health,
    Observer,
    RunInfo,
    StepRecord,
)
from nsa.monitor.writer import BackgroundWriter

Event = tuple[str, float, int]  # tag, value, x
HISTOGRAMS_EVERY = 10  # logged steps: a histogram is as large as fifty scalars
_GATE_EDGES = [index / GATE_BINS for index in range(GATE_BINS + 1)]
_DISTANCE_EDGES = [math.log2(edge) for edge in (*DISTANCES, 2 * DISTANCES[-1])]


class BackgroundMonitor:
    """Replaces `engine.monitor`, so that DeepSpeed's events are written on the writer's thread.

    DeepSpeed's own monitor flushes inside `engine.step()` and counts samples on the x axis; here x
    is `step()`. Its learning rate is left out: `train/lr` is the same number. Close the writer
    before the process group is destroyed.
    """

    def __init__(self, monitor: Any, writer: BackgroundWriter, step: Callable[[], int]) -> None:
        self.enabled = monitor.enabled
        self._monitor = monitor
        self._writer = writer
        self._step = step

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Queue events under `deepspeed/`; the caller may reuse the list."""
        step = self._step()
        events = [
            (f"deepspeed/{tag.rpartition('/')[2]}", value, step)
            for tag, value, _ in event_list
            if not tag.endswith("/lr")
        ]
        self._writer.submit(lambda: self._monitor.write_events(events))


class TrackerObserver(Observer):
    """Writes the scalars of every logged step, and histograms at every tenth.

    W&B and Comet get the nested `settings`, TensorBoard the `texts`. Scalars go to DeepSpeed's
    `monitor`, which flushes; the rest, which it cannot write, to the client of each tracker.
    """

    def __init__(self, monitor: Any, settings: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self._monitor = monitor
        self._settings = settings
        self._texts = texts
        self._board = getattr(getattr(monitor, "tb_monitor", None), "summary_writer", None)
        self._comet = getattr(getattr(monitor, "comet_monitor", None), "experiment", None)
        self._wandb: Any = None
        if getattr(monitor, "wandb_monitor", None) is not None:
            import wandb  # late: optional

            self._wandb = wandb
        self._health_records = 0

    def on_start(self, info: RunInfo) -> None:
        if self._wandb is not None:
            self._wandb.config.update(dict(self._settings))
        if self._comet is not None:
            self._comet.log_parameters(dict(_flatten(self._settings)))
        if self._board is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # late: optional

            # TensorBoard drops later values. Even at step 0: an earlier process may have logged
            # steps but saved no checkpoint.
            restart = Event(session_log=SessionLog(status=SessionLog.START))
            self._board.file_writer.add_event(restart, info.start_step + 1)
            for name, text in self._texts.items():
                self._board.add_text(f"run/{name}", f"```\n{text}```", info.start_step + 1)
            self._board.flush()

    def on_end(self, status: str) -> None:
        """End the trackers' runs here: the process skips their exit handlers."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(status.startswith(("failed", "no-go"))))
        if self._comet is not None:
            self._comet.end()

    def on_step(self, record: StepRecord) -> None:
        scalars = {tag: getattr(record, name) for name, tag in TAGS.items()}
        if record.versus_teacher:
            tokens = sum(row["tokens"] for row in record.versus_teacher)
            for name in ("teacher_loss", "kl"):
                total = sum(row[name] * row["tokens"] for row in record.versus_teacher)
                scalars[f"eval/{name}"] = total / tokens
        if record.health is not None:
            scalars |= _scalars(record.health)
            if self._board is not None and self._health_records % HISTOGRAMS_EVERY == 0:
                for histogram in _histograms(record.health, record.step):
                    self._board.add_histogram_raw(**histogram)
            self._health_records += 1
        self._monitor.write_events(
            [(tag, value, record.step) for tag, value in scalars.items() if value is not None]
        )


def _flatten(tree: Mapping[str, Any], parents: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; values other than numbers become text."""
    for key, value in tree.items():
        name = f"{parents}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value if isinstance(value, (bool, int, float, str)) else str(value)


def _scalars(health: Health) -> dict[str, float | None]:
    scalars: dict[str, float | None] = {
        f"gates/{name}": mean for name, mean in health.gates.items()
    }
    for index, layer in enumerate(health.layers):
        for name, value in layer.items():
            if name.startswith("gate_"):
                scalars[f"gates/layer{index:02}/{name.removeprefix('gate_')}"] = value
            elif not name.startswith("distance_from_"):
                scalars[f"selection/layer{index:02}/{name}"] = value
    return scalars


def _histograms(health: Health, step: int) -> Iterator[dict[str, Any]]:
    """Yield histograms, whose tags differ from scalars': a tag holds one kind of value."""
    for index, (layer, bins) in enumerate(zip(health.layers, health.gate_bins, strict=True)):
        for branch, fractions in bins.items():
            yield _histogram(f"gate_values/layer{index:02}/{branch}", step, fractions, _GATE_EDGES)
        distances = [layer[f"distance_from_{edge}"] for edge in DISTANCES]
        if measured := [fraction for fraction in distances if fraction is not None]:
            tag = f"selection_distance_log2/layer{index:02}"
            yield _histogram(tag, step, measured, _DISTANCE_EDGES)


def _histogram(
    tag: str, step: int, fractions: Sequence[float], edges: Sequence[float]
) -> dict[str, Any]:
    """Return the arguments of `add_histogram_raw`; values count as the middle of their bin."""
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    bins = list(zip(fractions, middles, strict=True))
    return {
        "tag": tag,
        "min": edges[0],
        "max": edges[-1],
        "num": sum(fractions),
        "sum": sum(fraction * middle for fraction, middle in bins),
        "sum_squares": sum(fraction * middle**2 for fraction, middle in bins),
        "bucket_limits": list(edges[1:]),
        "bucket_counts": list(fractions),
        "global_step": step,
    }
