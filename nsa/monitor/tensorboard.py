"""TensorBoard through DeepSpeed's monitor, moved off the training thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nsa.monitor.observer import Observer, StepRecord
from nsa.monitor.writer import BackgroundWriter

Event = tuple[str, float, int]  # tag, value, x


class EventMonitor(Protocol):
    """What DeepSpeed's engine asks of its `monitor`, and nothing more."""

    enabled: bool

    def write_events(self, event_list: Sequence[Event]) -> None: ...


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


class TensorBoardObserver(Observer):
    """The scalars of every logged step, at x = step."""

    def __init__(self, monitor: EventMonitor) -> None:
        self._monitor = monitor

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
        self._monitor.write_events(
            [(tag, value, record.step) for tag, value in scalars.items() if value is not None]
        )
