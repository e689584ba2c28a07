from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nsa.monitor.tensorboard import BackgroundMonitor, Event, Histogram, TensorBoardObserver
from nsa.monitor.writer import BackgroundWriter
from tests.monitor.records import PATIENCE, make_health, make_record
from tests.ranks import launch

RANK = Path(__file__).with_name("tensorboard_rank.py")


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = read_events(folder)
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_the_event_files_hold_every_scalar_and_deepspeeds_own(tmp_path: Path) -> None:
    outputs = launch(RANK, str(tmp_path), "healthy", world_size=2)
    assert all(output.endswith("steps 3 failed False\n") for output in outputs)
    assert len(list((tmp_path / "tb").iterdir())) == 1, "rank 0 alone writes"
    scalars = read_scalars(tmp_path / "tb")
    single = pytest.approx  # event files hold float32
    steps = (1, 2, 3)
    assert scalars.pop("Train/Samples/lr") == [(2 * step, 0.25) for step in steps]
    assert scalars.pop("train/loss") == [(step, single(make_record(step).loss)) for step in steps]
    assert scalars.pop("train/skipped_steps") == [(1, 0), (2, 1), (3, 2)]
    layers = {tag: scalars.pop(tag) for tag in list(scalars) if "/layer" in tag}
    gates, rest = {"": (0, 0.125, 0.25), "_std": [1 / 3] * 3, "_saturated": [0.25] * 3}, (2, 3)
    assert layers == {
        f"gates/layer00/{branch}{suffix}": [(step, single(values[place])) for step in rest]
        for suffix, values in gates.items()
        for place, branch in enumerate(("cmp", "sel", "win"))
    } | {
        "selection/layer00/choosing": [(step, 0.75) for step in rest],
        "selection/layer00/forced": [(step, 0.1875) for step in rest],
        "selection/layer00/entropy": [(step, 0.5) for step in rest],
        "selection/layer00/overlap": [(step, 0.875) for step in rest],
        "selection/layer00/distance": [(step, 6.5) for step in rest],
    }
    assert scalars == {
        "train/lr": [(step, single(1e-4 / 3)) for step in steps],
        "train/grad_norm": [(step, single(0.3)) for step in steps],
        "eval/loss": [(2, 2.5)],
        "eval/bits_per_byte": [(2, 1.25)],
        "speed/tokens_per_s": [(step, single(1e6 / 7)) for step in (2, 3)],
        "speed/mfu": [(step, 0.125) for step in (2, 3)],
        "speed/step_seconds": [(step, single(1 / 3)) for step in steps],
        "memory/gb": [(step, single(15.6 / 7)) for step in steps],
        "gates/cmp": [(step, 0.5) for step in (2, 3)],
        "gates/sel": [(step, 0.25) for step in (2, 3)],
        "gates/win": [(step, 0.75) for step in (2, 3)],
    }

    events = read_events(tmp_path / "tb")
    assert set(events.Tags()["histograms"]) == {
        "selection_distance/layer00",
        *(f"gate_values/layer00/{branch}" for branch in ("cmp", "sel", "win")),
    }
    (distances,) = events.Histograms("selection_distance/layer00")
    assert distances.step == 2
    assert distances.histogram_value.bucket_limit == [2.0**power for power in range(1, 11)]
    assert distances.histogram_value.bucket == [0.5] + [0] * 8 + [0.5]
    (values,) = events.Histograms("gate_values/layer00/sel")
    assert values.histogram_value.bucket == pytest.approx([0.05] * 20)
    assert (values.histogram_value.min, values.histogram_value.max) == (0, 1)


class KeptEvents:
    """A board that keeps what it is given."""

    enabled = True

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.histograms: list[Histogram] = []

    def write_events(self, event_list: Sequence[Event]) -> None:
        self.events.extend(event_list)

    def write_histograms(self, histograms: Sequence[Histogram]) -> None:
        self.histograms.extend(histograms)


def test_histograms_come_with_every_tenth_logged_step_and_what_was_not_measured_is_left_out() -> (
    None
):
    board = KeptEvents()
    observer = TensorBoardObserver(board)
    silent = make_health(1, entropy=None, overlap=None, distance=None, distances=[])
    for step in range(1, 22):
        observer.on_step(make_record(step, health=silent if step == 11 else make_health(1)))
    assert {(one.tag.split("/")[0], one.step) for one in board.histograms} == {
        ("gate_values", 1),
        ("gate_values", 11),
        ("gate_values", 21),
        ("selection_distance", 1),
        ("selection_distance", 21),
    }
    tags = {tag for tag, _, step in board.events if step == 11 and "layer" in tag}
    assert len(tags) == 11
    assert tags >= {"selection/layer00/choosing", "selection/layer00/forced"}


def test_a_disk_that_fills_up_under_tensorboard_costs_events_and_not_the_run(
    tmp_path: Path,
) -> None:
    (output,) = launch(RANK, str(tmp_path), "full", world_size=1)
    assert output.endswith("steps 6 failed True\n")
    assert [step for step, _ in read_scalars(tmp_path / "tb")["train/loss"]] == [1, 2, 3]


class HangingMonitor:
    """A monitor on a disk that hangs until it is let go."""

    enabled = True

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.written: list[Event] = []

    def write_events(self, event_list: Sequence[Event]) -> None:
        self.let_go.wait(PATIENCE)
        self.written.extend(event_list)


def test_writing_events_returns_while_the_disk_hangs_and_the_caller_may_reuse_its_list() -> None:
    disk = HangingMonitor()
    writer = BackgroundWriter("TensorBoard")
    monitor = BackgroundMonitor(disk, writer)
    assert monitor.enabled
    events: list[Event] = [("train/loss", 1.0, 1)]
    training = threading.Thread(target=lambda: monitor.write_events(events), daemon=True)
    training.start()
    training.join(PATIENCE / 2)
    waited = training.is_alive()
    events.clear()
    disk.let_go.set()
    writer.close()
    assert not waited, "write_events waited for the disk"
    assert disk.written == [("train/loss", 1.0, 1)]
