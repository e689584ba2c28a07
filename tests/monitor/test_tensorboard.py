"""TensorBoard's event files: each number once, over restarts, on a disk that fills up."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from nsa.monitor.observer import BackgroundWriter, Observers
from nsa.monitor.outputs import TrackerObserver
from tests.monitor.records import (
    NO_FREE_BLOCKS,
    drain,
    files_no_longer_than,
    make_layers,
    make_record,
)

Event = tuple[str, float, int]  # tag, value, x


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the texts as the TEXT page shows them: this accumulator keeps all of them."""
    events = plugin_event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag.removesuffix("/text_summary"): [
            (one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
        if tag.endswith("/text_summary")
    }


class ScalarMonitor:
    """DeepSpeed's monitor without a process group."""

    def __init__(self, summary_writer: SummaryWriter) -> None:
        self.tb_monitor = SimpleNamespace(summary_writer=summary_writer)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for event in event_list:
            self.tb_monitor.summary_writer.add_scalar(*event)
        self.tb_monitor.summary_writer.flush()


@contextmanager
def tracker(folder: Path, texts: dict[str, str], suffix: str = "") -> Iterator[TrackerObserver]:
    """An observer of one process that writes to TensorBoard in `folder`."""
    with SummaryWriter(str(folder), filename_suffix=suffix) as summary_writer:
        yield TrackerObserver(ScalarMonitor(summary_writer), {}, texts)


def test_the_event_files_hold_each_number_once(tmp_path: Path) -> None:
    texts = {"config.yaml": "model:\n  layers: 2\n", "ds_config.json": "{}\n"}
    with tracker(tmp_path / "tb", texts) as observer:
        observer.on_start(tmp_path, 0)
        for step in range(1, 4):
            versus = [{"tokens": 3, "teacher_loss": 1.0, "kl": 0.5}]
            versus += [{"tokens": 1, "teacher_loss": 3.0, "kl": 1.5}]
            evaluated = {"val_loss": 2.5, "bits_per_byte": 1.25, "versus_teacher": versus}
            evaluated = evaluated if step == 2 else {}
            warm = {"mfu": 0.125, "layers": make_layers(1)} if step > 1 else {"tokens_per_s": None}
            observer.on_step(make_record(step, skipped_steps=step - 1, **evaluated, **warm))
        observer.on_end("finished")
    scalars = read_scalars(tmp_path / "tb")
    single = pytest.approx  # event files hold float32
    steps = (1, 2, 3)
    assert scalars.pop("train/loss") == [(step, single(make_record(step).loss)) for step in steps]
    assert scalars.pop("train/skipped_steps") == [(1, 0), (2, 1), (3, 2)]
    layers = {tag: scalars.pop(tag) for tag in list(scalars) if "/layer" in tag}
    gates, rest = {"": (0, 0.125, 0.25), "_std": [1 / 3] * 3}, (2, 3)
    assert layers == {
        f"gates/layer00/{branch}{suffix}": [(step, single(values[place])) for step in rest]
        for suffix, values in gates.items()
        for place, branch in enumerate(("cmp", "sel", "win"))
    } | {
        "selection/layer00/choosing": [(step, 0.75) for step in rest],
        "selection/layer00/entropy": [(step, 0.5) for step in rest],
        "selection/layer00/overlap": [(step, 0.875) for step in rest],
        "selection/layer00/distance": [(step, 6.5) for step in rest],
    }
    assert scalars == {
        "train/lr": [(step, single(1e-4 / 3)) for step in steps],
        "train/grad_norm": [(step, single(0.3)) for step in steps],
        "eval/loss": [(2, 2.5)],
        "eval/bits_per_byte": [(2, 1.25)],
        "eval/teacher_loss": [(2, 1.5)],
        "eval/kl": [(2, 0.75)],
        "speed/tokens_per_s": [(step, single(1e6 / 7)) for step in (2, 3)],
        "speed/mfu": [(step, 0.125) for step in (2, 3)],
        "speed/step_seconds": [(step, single(1 / 3)) for step in steps],
        "memory/peak_gb": [(step, single(15.6 / 7)) for step in steps],
        "gates/cmp": [(step, 0) for step in (2, 3)],
        "gates/sel": [(step, 0.125) for step in (2, 3)],
        "gates/win": [(step, 0.25) for step in (2, 3)],
    }
    assert read_texts(tmp_path / "tb") == {
        "run/config.yaml": [(1, "```\nmodel:\n  layers: 2\n```")],
        "run/ds_config.json": [(1, "```\n{}\n```")],
    }


def test_steps_taken_again_are_shown_once(tmp_path: Path) -> None:
    """Three steps without a checkpoint, then ten, then again from step 6."""
    begun = ((0, [1, 2, 3]), (0, range(1, 11)), (6, range(7, 12)))
    for number, (start, taken) in enumerate(begun):
        texts = {"config.yaml": f"began at {start}\n"}
        with tracker(tmp_path / "tensorboard", texts, suffix=f".{number}") as observer:
            observer.on_start(tmp_path, start)
            for step in taken:
                observer.on_step(make_record(step, loss=start + step, layers=make_layers(1)))
            observer.on_end("preempted: SIGTERM" if start == 0 else "finished")
    points = read_scalars(tmp_path / "tensorboard")["train/loss"]
    assert points == [(step, step if step <= 6 else 6 + step) for step in range(1, 12)]
    assert read_texts(tmp_path / "tensorboard") == {
        "run/config.yaml": [(1, "```\nbegan at 0\n```"), (7, "```\nbegan at 6\n```")]
    }


def test_missing_values_have_no_scalar(tmp_path: Path) -> None:
    with tracker(tmp_path, {}) as observer:
        layers = make_layers(1, **NO_FREE_BLOCKS, gate_win=None)
        observer.on_step(make_record(1, layers=layers))
    tags = read_scalars(tmp_path)
    assert {tag for tag in tags if tag.startswith("selection/")} == {"selection/layer00/choosing"}
    assert {tag for tag in tags if tag.endswith(("/cmp", "/sel", "/win"))} == {
        f"gates/{layer}{branch}" for layer in ("", "layer00/") for branch in ("cmp", "sel")
    }


@pytest.mark.parametrize(
    ("status", "code"), [("finished", 0), ("no-go: smoke", 1), ("failed: an error", 1)]
)
def test_wandb_shows_whether_a_run_failed(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    client = SimpleNamespace(finish=lambda exit_code: ended.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", client)
    TrackerObserver(SimpleNamespace(wandb_monitor=object()), {}, {}).on_end(status)
    assert ended == [code]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_up_under_tensorboard_costs_events_and_not_the_run(
    tmp_path: Path,
) -> None:
    summary_writer = SummaryWriter(str(tmp_path / "tb"))
    writer = BackgroundWriter("TensorBoard")
    observers = Observers([(TrackerObserver(ScalarMonitor(summary_writer), {}, {}), writer)])
    observers.on_start(tmp_path, 0)
    for step in (1, 2, 3):
        observers.on_step(make_record(step))
    drain(writer)
    (event_file,) = (tmp_path / "tb").iterdir()
    with files_no_longer_than(event_file.stat().st_size + 10):
        for step in (4, 5, 6):
            observers.on_step(make_record(step))
        drain(writer)
    observers.close()
    with suppress(OSError):
        summary_writer.close()  # which ends its thread
    assert writer.failed > 0
    assert [step for step, _ in read_scalars(tmp_path / "tb")["train/loss"]] == [1, 2, 3]
