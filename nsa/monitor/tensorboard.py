"""TensorBoard through DeepSpeed's monitor, moved off the training thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from nsa.monitor.observer import (
    BRANCHES,
    DISTANCES,
    GATE_BINS,
    Health,
    Observer,
    RunInfo,
    StepRecord,
)
from nsa.monitor.writer import BackgroundWriter

Event = tuple[str, float, int]  # tag, value, x
Write = Callable[[Any], object]  # given torch's SummaryWriter
METRICS = ("train/loss", "eval/loss", "eval/bits_per_byte", "speed/tokens_per_s")  # of HPARAMS
SHOWN_FIRST = (  # of its settings; the others are there to be ticked
    "deepspeed.stage",
    "model.attention.branches",
    "model.attention.compressor",
    "model.attention.kind",
    "train.learning_rate",
)
HISTOGRAMS_EVERY = 10  # logged steps: a histogram is as large as fifty scalars
_GATE_EDGES = [index / GATE_BINS for index in range(GATE_BINS + 1)]
_DISTANCE_EDGES = [math.log2(edge) for edge in (*DISTANCES, 2 * DISTANCES[-1])]


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


class Board(Protocol):
    """What the observer needs."""

    def write_scalars(self, scalars: Sequence[Event]) -> None: ...

    def write(self, what: Write) -> None: ...


class BackgroundMonitor:
    """Stands in for `engine.monitor`: its events and ours, written and flushed by another thread.

    DeepSpeed's own monitor flushes inside `engine.step()`, and puts its figures at x = samples,
    where ours stand at x = step; here all stand at `step()`, the steps that the engine has taken.
    Close the writer before the process group is destroyed.
    """

    def __init__(
        self, monitor: EventMonitor, writer: BackgroundWriter, step: Callable[[], int]
    ) -> None:
        self.enabled = monitor.enabled
        self._monitor = monitor
        self._writer = writer
        self._step = step

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Queue what DeepSpeed says, under `deepspeed/`; the list may be reused by the caller."""
        step = self._step()
        found = [
            (f"deepspeed/{tag.rpartition('/')[2]}", value, step) for tag, value, _ in event_list
        ]
        self.write_scalars(found)

    def write_scalars(self, scalars: Sequence[Event]) -> None:
        """Queue our own figures; the list may be reused by the caller."""
        events = list(scalars)
        self._writer.submit(lambda: self._monitor.write_events(events))

    def write(self, what: Write) -> None:
        """Queue what only TensorBoard shows, past DeepSpeed's monitor, which knows scalars only.

        It is on disk when the scalars that follow are.
        """
        board = getattr(self._monitor, "tb_monitor", None)
        if board is not None and board.summary_writer is not None:
            self._writer.submit(lambda: what(board.summary_writer))


class TensorBoardObserver(Observer):
    """The scalars of every logged step, and histograms of every tenth, at x = step.

    `settings`, a tree, is what the run is listed under among others (HPARAMS); `texts` are shown
    as they are, by name.
    """

    def __init__(self, board: Board, settings: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self._board = board
        self._settings = settings
        self._texts = texts
        self._healthy = 0  # records with the layers' health so far

    def on_start(self, info: RunInfo) -> None:
        """Drop what is shown of steps that this run is about to take again, and say what it is."""
        # At 0 too: a run may have ended before its first checkpoint.
        self.on_rollback(info.start_step)
        self._board.write(lambda board: _introduce(board, info, self._settings, self._texts))

    def on_rollback(self, step: int) -> None:
        self._board.write(lambda board: _restart(board, step + 1))

    def on_end(self, status: str) -> None:
        """Only success is written: TensorBoard keeps the first end, and other runs may resume."""
        if status == "finished":
            self._board.write(_succeed)

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
                histograms = list(_histograms(record.health, record.step))
                self._board.write(lambda board: _add(board, histograms))
            self._healthy += 1
        self._board.write_scalars(
            [(tag, value, record.step) for tag, value in scalars.items() if value is not None]
        )


def _add(board: Any, histograms: Sequence[Histogram]) -> None:
    for histogram in histograms:
        board.add_histogram_raw(**histogram.raw())


def _restart(board: Any, step: int) -> None:
    """TensorBoard forgets what it has from `step` on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # late: seldom needed

    board.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)


def _introduce(
    board: Any, info: RunInfo, settings: Mapping[str, Any], texts: Mapping[str, str]
) -> None:
    """The settings as a table's row, and texts at the first step that is taken with them."""
    about = {"recipe": info.name, "profile": info.profile, "ranks": info.world_size}
    for summary in _hparams(dict(_flat({"run": about, **settings})))[:2]:
        board.file_writer.add_summary(summary)
    for name, text in texts.items():
        board.add_text(f"run/{name}", f"```\n{text}```", info.start_step + 1)
    board.flush()


def _flat(tree: Mapping[str, Any], parents: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves by their whole names; what is no number and no text is shown as text."""
    for key, value in tree.items():
        name = f"{parents}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value if isinstance(value, (bool, int, float, str)) else str(value)


def _succeed(board: Any) -> None:
    board.file_writer.add_summary(_hparams({})[2])
    board.flush()


def _hparams(settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """What the HPARAMS page reads: its columns, a run's values, and that it ended well."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # late: both may be
    from torch.utils.tensorboard.summary import hparams  # switched off

    columns, start, end = hparams(settings, dict.fromkeys(METRICS))
    written = columns.value[0].metadata.plugin_data
    page = HParamsPluginData.FromString(written.content)
    for column in page.experiment.hparam_infos:
        column.differs = column.name in SHOWN_FIRST  # those come first, five are shown
    written.content = page.SerializeToString()
    return columns, start, end


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
            tag = f"selection_distance_log2/layer{index:02}"
            yield Histogram(tag, layer.distances, _DISTANCE_EDGES, step)
