"""TensorBoard through DeepSpeed's monitor, moved off the training thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from nsa.monitor.observer import BRANCHES, DISTANCES, GATE_BINS, Health, Observer, StepRecord
from nsa.monitor.writer import BackgroundWriter

Event = tuple[str, float, int]  # tag, value, x
HISTOGRAMS_EVERY = 10  # logged steps: a histogram is as large as fifty scalars
_GATE_EDGES = [index / GATE_BINS for index in range(GATE_BINS + 1)]
_DISTANCE_EDGES = [float(edge) for edge in (*DISTANCES, 2 * DISTANCES[-1])]


@dataclass(frozen=True)
class Histogram:
    """Shares of what lies between each edge and the next."""

    tag: str
    shares: Sequence[float]
    edges: Sequence[float]
    step: int

    def raw(self) -> dict[str, Any]:
        """What `SummaryWriter.add_histogram_raw` takes; values stand in the middle of their bin."""
        middles = [(low + high) / 2 for low, high in pairwise(self.edges)]
        found = list(zip(self.shares, middles, strict=True))
        return {
            "tag": self.tag,
            "min": self.edges[0],
            "max": self.edges[-1],
            "num": sum(self.shares),
            "sum": sum(share * middle for share, middle in found),
            "sum_squares": sum(share * middle**2 for share, middle in found),
            "bucket_limits": list(self.edges[1:]),
            "bucket_counts": list(self.shares),
            "global_step": self.step,
        }


class EventMonitor(Protocol):
    """What DeepSpeed's engine asks of its `monitor`, and nothing more."""

    enabled: bool

    def write_events(self, event_list: Sequence[Event]) -> None: ...


class HistogramMonitor(EventMonitor, Protocol):
    """What can show histograms as well."""

    def write_histograms(self, histograms: Sequence[Histogram]) -> None: ...


class BackgroundMonitor:
    """Stands in for `engine.monitor`: the same events, written and flushed by another thread.

    DeepSpeed's own monitor flushes inside `engine.step()`. Set `engine.monitor` to this and its
    events take the same way as ours. Close the writer before the process group is destroyed.
    """

    def __init__(self, monitor: EventMonitor, writer: BackgroundWriter) -> None:
        self.enabled = monitor.enabled
        self._monitor = monitor
        self._writer = writer

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Queue the events; the list may be reused by the caller."""
        events = list(event_list)
        self._writer.submit(lambda: self._monitor.write_events(events))

    def write_histograms(self, histograms: Sequence[Histogram]) -> None:
        """Queue histograms for TensorBoard, past DeepSpeed's monitor, which knows scalars only.

        They are on disk when the events that follow are.
        """
        board = getattr(self._monitor, "tb_monitor", None)
        if board is not None and board.summary_writer is not None:
            self._writer.submit(lambda: _add(board.summary_writer, histograms))


def _add(summary_writer: Any, histograms: Sequence[Histogram]) -> None:
    for histogram in histograms:
        summary_writer.add_histogram_raw(**histogram.raw())


class TensorBoardObserver(Observer):
    """The scalars of every logged step, and histograms of every tenth, at x = step."""

    def __init__(self, monitor: HistogramMonitor) -> None:
        self._monitor = monitor
        self._healthy = 0  # records with the layers' health so far

    def on_step(self, record: StepRecord) -> None:
        scalars = {
            "train/loss": record.loss,
            "train/lr": record.lr,
            "train/grad_norm": record.grad_norm,
            "train/skipped_steps": record.skipped_steps,
            "eval/loss": record.val_loss,
            "eval/bits_per_byte": record.bits_per_byte,
            "speed/tokens_per_s": record.tokens_per_s,
            "speed/mfu": record.mfu,
            "speed/step_seconds": record.seconds,
            "memory/gb": record.memory_gb,
            **{f"gates/{branch}": mean for branch, mean in record.gates.items()},
        }
        if record.health is not None:
            scalars |= _scalars(record.health)
            if self._healthy % HISTOGRAMS_EVERY == 0:
                self._monitor.write_histograms(list(_histograms(record.health, record.step)))
            self._healthy += 1
        self._monitor.write_events(
            [(tag, value, record.step) for tag, value in scalars.items() if value is not None]
        )


def _scalars(health: Health) -> dict[str, float | None]:
    scalars: dict[str, float | None] = {}
    for index, layer in enumerate(health.layers):
        gates, selection = f"gates/layer{index:02}", f"selection/layer{index:02}"
        for branch in BRANCHES:
            scalars[f"{gates}/{branch}"] = layer.gate_mean[branch]
            scalars[f"{gates}/{branch}_std"] = layer.gate_std[branch]
            scalars[f"{gates}/{branch}_saturated"] = layer.gate_saturated[branch]
        for figure in ("choosing", "forced", "entropy", "overlap", "distance"):
            scalars[f"{selection}/{figure}"] = getattr(layer, figure)
    return scalars


def _histograms(health: Health, step: int) -> Iterator[Histogram]:
    """Under names of their own: TensorBoard takes a name for one kind of figure."""
    for index, layer in enumerate(health.layers):
        for branch in BRANCHES:
            tag = f"gate_values/layer{index:02}/{branch}"
            yield Histogram(tag, layer.gate_bins[branch], _GATE_EDGES, step)
        if layer.distances:
            tag = f"selection_distance/layer{index:02}"
            yield Histogram(tag, layer.distances, _DISTANCE_EDGES, step)
