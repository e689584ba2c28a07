"""TensorBoard and DeepSpeed's other trackers, written off the training thread.

All get scalars; W&B also the settings, TensorBoard texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa.monitor.observer import TAGS, Health, Observer, RunInfo, StepRecord
from nsa.monitor.writer import BackgroundWriter

Event = tuple[str, float, int]  # tag, value, x


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
    """Writes the scalars of every logged step.

    W&B gets the nested `settings`, TensorBoard the `texts`. Scalars go to DeepSpeed's `monitor`,
    which flushes; the rest, which it cannot write, to the client of each tracker.
    """

    def __init__(self, monitor: Any, settings: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self._monitor = monitor
        self._settings = settings
        self._texts = texts
        self._board = getattr(getattr(monitor, "tb_monitor", None), "summary_writer", None)
        self._wandb: Any = None
        if getattr(monitor, "wandb_monitor", None) is not None:
            import wandb  # late: optional

            self._wandb = wandb

    def on_start(self, info: RunInfo) -> None:
        if self._wandb is not None:
            self._wandb.config.update(dict(self._settings))
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
        """End W&B's run here: the process skips its exit handler."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(status.startswith(("failed", "no-go"))))

    def on_step(self, record: StepRecord) -> None:
        scalars = {tag: getattr(record, name) for name, tag in TAGS.items()}
        if record.versus_teacher:
            tokens = sum(row["tokens"] for row in record.versus_teacher)
            for name in ("teacher_loss", "kl"):
                total = sum(row[name] * row["tokens"] for row in record.versus_teacher)
                scalars[f"eval/{name}"] = total / tokens
        if record.health is not None:
            scalars |= _scalars(record.health)
        self._monitor.write_events(
            [(tag, value, record.step) for tag, value in scalars.items() if value is not None]
        )


def _scalars(health: Health) -> dict[str, float | None]:
    scalars: dict[str, float | None] = {
        f"gates/{name}": mean for name, mean in health.gates.items()
    }
    for index, layer in enumerate(health.layers):
        for name, value in layer.items():
            if name.startswith("gate_"):
                scalars[f"gates/layer{index:02}/{name.removeprefix('gate_')}"] = value
            else:
                scalars[f"selection/layer{index:02}/{name}"] = value
    return scalars
