from __future__ import annotations

from pathlib import Path

import pytest

from nsa.monitor.observer import Observer, Observers, RunInfo, StepRecord
from tests.monitor.records import make_info, make_record


class Diary(Observer):
    """Writes each call into a file, unbuffered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[str] = []

    def note(self, text: str) -> None:
        self.calls.append(text)
        with self.path.open("a") as file:
            file.write(text)

    def on_start(self, info: RunInfo) -> None:
        self.note("start")

    def on_step(self, record: StepRecord) -> None:
        self.note(f"step {record.step}")

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        self.note(f"checkpoint {step}")

    def on_message(self, text: str) -> None:
        self.note(text)

    def on_end(self, status: str) -> None:
        self.note(status)


class PerRankDiary(Diary):
    every_rank = True


def tell_a_whole_run(observers: Observer, info: RunInfo) -> None:
    observers.on_start(info)
    observers.on_step(make_record(1))
    observers.on_checkpoint(1, info.run_dir, 0.5)
    observers.on_message("hello")
    observers.on_end("done")


WHOLE_RUN = ["start", "step 1", "checkpoint 1", "hello", "done"]


def test_an_observer_whose_disk_is_full_is_reported_once_and_the_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy, full = Diary(tmp_path / "diary"), Diary(Path("/dev/full"))
    tell_a_whole_run(Observers([full, healthy]), make_info(tmp_path))
    assert healthy.calls == WHOLE_RUN
    assert full.calls == ["start"]
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "Diary failed and is off for the rest of the run" in err
    assert "No space left on device" in err


def test_a_full_stderr_cannot_stop_the_run_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # unbuffered, so that closing has nothing to flush
    with open("/dev/full", "wb", buffering=0) as raw:

        class Full:
            def write(self, text: str) -> int:
                return raw.write(text.encode())

            def flush(self) -> None:
                raw.flush()

        monkeypatch.setattr("sys.stderr", Full())
        tell_a_whole_run(Observers([Diary(Path("/dev/full"))]), make_info(tmp_path))


def test_other_ranks_call_only_observers_of_every_rank(tmp_path: Path) -> None:
    one, every = Diary(tmp_path / "one"), PerRankDiary(tmp_path / "every")
    tell_a_whole_run(Observers([one, every]), make_info(tmp_path, rank=1, world_size=2))
    assert one.calls == []
    assert every.calls == WHOLE_RUN
