from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nsa.monitor.observer import BackgroundWriter, Observer, Observers, RunInfo, StepRecord
from tests.monitor.records import PATIENCE, make_info, make_record


class CallLog(Observer):
    """Writes each call into a file, unbuffered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[str] = []

    def record(self, text: str) -> None:
        self.calls.append(text)
        with self.path.open("a") as file:
            file.write(text)

    def on_start(self, info: RunInfo) -> None:
        self.record("start")

    def on_step(self, record: StepRecord) -> None:
        self.record(f"step {record.step}")

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        self.record(f"checkpoint {step}")

    def on_message(self, text: str) -> None:
        self.record(text)

    def on_end(self, status: str) -> None:
        self.record(status)


def call_all(observers: Observer, info: RunInfo) -> None:
    observers.on_start(info)
    observers.on_step(make_record(1))
    observers.on_checkpoint(1, info.run_dir, 0.5)
    observers.on_message("hello")
    observers.on_end("done")


ALL_CALLS = ["start", "step 1", "checkpoint 1", "hello", "done"]


def test_an_observer_whose_disk_is_full_is_reported_once_and_the_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy, full = CallLog(tmp_path / "log"), CallLog(Path("/dev/full"))
    call_all(Observers([(full, None), (healthy, None)]), make_info(tmp_path))
    assert healthy.calls == ALL_CALLS
    assert full.calls == ["start"]
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "CallLog failed and is off for the rest of the run" in err
    assert "No space left on device" in err


def test_an_observer_that_hangs_delays_neither_the_run_nor_the_others(tmp_path: Path) -> None:
    released = threading.Event()

    class Hanging(CallLog):
        def on_start(self, info: RunInfo) -> None:
            released.wait(PATIENCE)
            super().on_start(info)

    hanging, healthy = Hanging(tmp_path / "hanging"), CallLog(tmp_path / "healthy")
    observers = Observers([(one, BackgroundWriter("log")) for one in (hanging, healthy)])
    call_all(observers, make_info(tmp_path))  # returns, though `released` is not set
    assert hanging.calls == []
    released.set()
    observers.close()
    assert hanging.calls == healthy.calls == ALL_CALLS


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
        call_all(Observers([(CallLog(Path("/dev/full")), None)]), make_info(tmp_path))
