"""What the training loop tells those who watch it, and the fan-out that keeps them harmless."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa.constants import BRANCHES


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a run is, known before its first step."""

    run_dir: Path
    name: str
    profile: str
    total_steps: int  # where the schedule ends
    start_step: int = 0  # steps already done; more than 0 in a resumed run
    rank: int = 0
    world_size: int = 1
    parameters: int = 0
    flops_per_token: float = 0.0  # forward and backward, executed
    notes: Sequence[str] = ()  # lines that the user should see before the first step


GATE_BINS = 20  # of equal width from 0 to 1; the outermost two hold the saturated gates
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # blocks; where each bin of distance begins


@dataclass(frozen=True, kw_only=True)
class LayerHealth:
    """Gates and selection of one layer; docs/health.md defines each and says how to read it.

    What is about picks is None where no query had more blocks before it than it may choose.
    """

    gate_mean: Mapping[str, float]  # of each branch, over tokens and heads
    gate_std: Mapping[str, float]  # around that mean
    gate_saturated: Mapping[str, float]  # share below 0.05 or from 0.95 on
    gate_bins: Mapping[str, Sequence[float]]  # share of the gates in each of GATE_BINS
    choosing: float  # share of queries with more candidates than they may choose
    forced: float  # share of all chosen blocks that are initial or local ones
    entropy: float | None  # of free picks over blocks: 0 always the same ones, 1 all alike
    overlap: float | None  # share of a query's free picks that the token before it has as well
    distance: float | None  # mean blocks back to a free pick
    distances: Sequence[float]  # share of the free picks in each bin of DISTANCES; may be empty


@dataclass(frozen=True)
class Health:
    """Of every NSA layer, from a sample of one micro-batch on rank 0."""

    layers: Sequence[LayerHealth]

    @property
    def gates(self) -> dict[str, float]:
        """The mean gate of each branch over the layers."""
        return {
            branch: sum(layer.gate_mean[branch] for layer in self.layers) / len(self.layers)
            for branch in BRANCHES
        }


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Everything known about one logged step; None stands for "not measured here"."""

    step: int  # optimizer steps done, this one included
    tokens: int  # seen by all ranks since the first step of the run
    loss: float
    val_loss: float | None = None
    bits_per_byte: float | None = None  # of the held-out split
    lr: float
    grad_norm: float | None
    tokens_per_s: float | None  # all ranks; None while only the warm-up step was timed
    mfu: float | None = None  # 0 to 1; None on hardware whose peak is unknown
    memory_gb: float  # peak so far
    seconds: float  # of one step, the mean since the last logged one
    skipped_steps: int = 0  # since the start: steps that overflowed and were not applied
    gates: Mapping[str, float] = field(default_factory=dict)  # mean gate of each branch
    health: Health | None = None  # each layer's gates and selection; None for dense attention


class Observer:
    """Hangs on the training loop and cannot change what it computes. Override what you need."""

    every_rank = False  # False: told about rank 0 only

    def on_start(self, info: RunInfo) -> None:
        """The run is built and about to take its first step."""

    def on_step(self, record: StepRecord) -> None:
        """A logged step is done; steps between two logged ones are not told."""

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """The state after `step` is on disk; training stood still for `seconds`. Not told by the
        training thread."""

    def on_rollback(self, step: int) -> None:
        """The run went back to `step`, from where it takes its steps again."""

    def on_gate(self, name: str, go: bool) -> None:
        """The run was judged at a gate; the verdict is on disk."""

    def on_message(self, text: str) -> None:
        """A line for the user."""

    def on_end(self, status: str) -> None:
        """The loop has ended; `status` says how."""


class Observers(Observer):
    """Tells each observer in turn; one that raises is reported, and told nothing more."""

    every_rank = True

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._active = list(observers)

    def on_start(self, info: RunInfo) -> None:
        if info.rank != 0:
            self._active = [observer for observer in self._active if observer.every_rank]
        self._tell(lambda observer: observer.on_start(info))

    def on_step(self, record: StepRecord) -> None:
        self._tell(lambda observer: observer.on_step(record))

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        self._tell(lambda observer: observer.on_checkpoint(step, path, seconds))

    def on_rollback(self, step: int) -> None:
        self._tell(lambda observer: observer.on_rollback(step))

    def on_gate(self, name: str, go: bool) -> None:
        self._tell(lambda observer: observer.on_gate(name, go))

    def on_message(self, text: str) -> None:
        self._tell(lambda observer: observer.on_message(text))

    def on_end(self, status: str) -> None:
        self._tell(lambda observer: observer.on_end(status))

    def _tell(self, event: Callable[[Observer], None]) -> None:
        for observer in list(self._active):
            try:
                event(observer)
            except Exception as error:
                self._active.remove(observer)
                name = type(observer).__name__
                warn(f"{name} failed and is off for the rest of the run: {error!r}")


def warn(text: str) -> None:
    """One line on stderr, which may itself be full or closed: then there is nobody to tell."""
    with contextlib.suppress(OSError, ValueError):
        print(f"nsa: {text}", file=sys.stderr, flush=True)
