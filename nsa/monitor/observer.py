"""Observers of the training loop: their callbacks, and the records that these receive."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from nsa.constants import BRANCHES
from nsa.untrusted import printable


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run before its first step."""

    run_dir: Path
    name: str
    profile: str
    total_steps: int  # where the run stops
    start_step: int = 0  # steps already done; above 0 in a resumed run
    world_size: int = 1
    parameters: int = 0
    flops_per_token: float = 0.0  # forward and backward, executed
    notes: Sequence[str] = ()  # lines printed before the first step


# Of each range of positions: the model beside its teacher. docs/reference/metrics.md defines them.
TEACHER_COLUMNS = ("first", "last", "tokens", "loss", "teacher_loss", "kl", "same_top1")
GATE_BINS = 20  # of equal width from 0 to 1; the first and last hold the saturated gates
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # blocks: lower edges of the distance bins


LAYER_STATISTICS = (  # columns of selection.csv; docs/reference/metrics.md defines each
    *(f"gate_{branch}{suffix}" for suffix in ("", "_std", "_saturated") for branch in BRANCHES),
    "choosing",
    "forced",
    "entropy",
    "overlap",
    "distance",
    *(f"distance_from_{edge}" for edge in DISTANCES),
)
# Further columns of a run with the selector loss, from its sampled queries.
SELECTOR_STATISTICS = ("selector_loss", "recall", "recall_random")


@dataclass(frozen=True)
class Health:
    """Health of all NSA layers, from a sample of one micro-batch on rank 0.

    Statistics of free blocks are None if no query had more candidates than it may select.
    """

    # LAYER_STATISTICS of each layer, and with the selector loss its SELECTOR_STATISTICS
    layers: Sequence[Mapping[str, float | None]]
    gate_bins: Sequence[Mapping[str, Sequence[float]]]  # by branch: fraction in each of GATE_BINS

    @property
    def gates(self) -> dict[str, float]:
        """The mean gate of each branch over the layers."""
        return {
            branch: fmean(layer[f"gate_{branch}"] or 0.0 for layer in self.layers)
            for branch in BRANCHES
        }


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one logged step; None: not measured."""

    step: int  # optimizer steps done, including this one
    tokens: int  # of all ranks since the first step of the run
    loss: float
    val_loss: float | None = None
    bits_per_byte: float | None = None  # of the validation split
    lr: float
    grad_norm: float | None
    tokens_per_s: float | None  # all ranks; None if only the warm-up step was timed
    mfu: float | None = None  # 0 to 1; None on hardware of unknown peak
    memory_gb: float  # peak so far
    seconds: float  # per step, mean since the previous logged step
    skipped_steps: int = 0  # since the first step of the run
    health: Health | None = None  # None for dense attention
    versus_teacher: Sequence[Mapping[str, float]] = ()  # of the validation split: TEACHER_COLUMNS


class Observer:
    """Callbacks of the training loop on rank 0; they cannot change what it computes.

    Called on the thread of the observer's writer, where they may wait for disks; without a writer,
    on the training thread.
    """

    def on_start(self, info: RunInfo) -> None:
        """Called before the first step."""

    def on_step(self, record: StepRecord) -> None:
        """Called after each logged step."""

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """Called once the checkpoint of `step` is on disk; saving paused training for `seconds`."""

    def on_rollback(self, step: int) -> None:
        """Called after a rollback to `step`; the steps after it will run again."""

    def on_gate(self, name: str, go: bool) -> None:
        """Called at each gate, after gates.json was written."""

    def on_message(self, text: str) -> None:
        """Called with a line for the user."""

    def on_end(self, status: str) -> None:
        """Called after the last step."""


def warn(text: str) -> None:
    """Print one line to stderr; ignore an stderr that is full or closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"nsa: {printable(text)}", file=sys.stderr, flush=True)
