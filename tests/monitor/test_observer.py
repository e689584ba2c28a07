"""Observers, and the writers on whose threads they run: a disk costs lines, not the run."""

import contextlib
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.monitor.observer import BackgroundWriter, Observer, Observers, StepRecord, warn
from nsa.system import with_timeout
from tests.monitor.run_folders import make_record
from tests.ranks import PATIENCE


class CallLog(Observer):
    """Writes each call into a file, unbuffered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[str] = []

    def record(self, text: str) -> None:
        self.calls.append(text)
        with self.path.open("a") as file:
            file.write(text)

    def on_start(self, run_dir: Path, start_step: int) -> None:
        self.record("start")

    def on_step(self, record: StepRecord) -> None:
        self.record(f"step {record.step}")

    def on_message(self, text: str) -> None:
        self.record(text)

    def on_end(self, status: str) -> None:
        self.record(status)


def test_an_observer_that_hangs_or_fails_delays_neither_the_run_nor_the_others(
    tmp_path: Path,
) -> None:
    released = threading.Event()

    class Hanging(CallLog):
        def on_start(self, run_dir: Path, start_step: int) -> None:
            released.wait(PATIENCE)
            super().on_start(run_dir, start_step)

    hanging, healthy = Hanging(tmp_path / "hanging"), CallLog(tmp_path / "healthy")
    full = CallLog(Path("/dev/full"))
    writers = [BackgroundWriter("log") for _ in range(3)]
    observers = Observers(list(zip((hanging, full, healthy), writers, strict=True)))
    observers.on_start(tmp_path, 0)
    observers.on_step(make_record(1))
    observers.on_message("hello")
    observers.on_end("done")  # returns, though `released` is not set
    assert hanging.calls == []
    released.set()
    observers.close()
    calls = ["start", "step 1", "hello", "done"]
    assert hanging.calls == healthy.calls == full.calls == calls
    assert [writer.failed for writer in writers] == [0, 4, 0]


def test_writers_that_hang_share_the_time_of_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, timeouts = [0.0], list[float]()

    def close(timeout: float) -> None:
        timeouts.append(timeout)
        now[0] += 6.0

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    writer: Any = SimpleNamespace(close=close)
    Observers([(Observer(), writer)] * 3).close(timeout=10.0)
    assert timeouts == [10.0, 4.0, 0.0]


def hang(writer: BackgroundWriter) -> threading.Event:
    """Let a job of the writer hang until the returned event is set."""
    hanging, released = threading.Event(), threading.Event()
    writer.submit(lambda: (hanging.set(), released.wait(PATIENCE)))
    assert hanging.wait(PATIENCE)
    return released


def test_submitting_returns_while_a_write_hangs_and_dropped_jobs_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = BackgroundWriter("slow disk", capacity=2)
    released = hang(writer)
    written: list[int] = []

    def submit() -> list[bool]:
        return [writer.submit(lambda number=number: written.append(number)) for number in range(5)]

    assert with_timeout(PATIENCE / 2, submit) == [True, True, False, False, False]
    assert writer.dropped == 3
    released.set()
    for _ in range(2):
        writer.close()
    assert written == [0, 1]
    assert capsys.readouterr().err.count("slow disk: 3 writes dropped and 0 failed") == 1


@pytest.mark.parametrize("capacity", [1, 8])  # the queue is full, or not
def test_closing_gives_up_on_a_write_that_hangs_and_counts_the_rest(
    capacity: int, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = BackgroundWriter("dead disk", capacity)
    released = hang(writer)
    writer.submit(lambda: None)
    with_timeout(PATIENCE / 2, lambda: writer.close(timeout=0.05))
    released.set()
    assert writer.dropped == 2
    assert "dead disk: 2 writes dropped" in capsys.readouterr().err


@pytest.mark.parametrize("full_stderr", [False, True])
def test_a_full_disk_costs_lines_and_not_the_run(
    full_stderr: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does another error. Not even with stderr in a file on that disk."""

    def write() -> None:
        with open("/dev/full", "w") as file:
            file.write("a line\n")

    with open("/dev/full", "w", buffering=1) as stderr:
        if full_stderr:
            monkeypatch.setattr("sys.stderr", stderr)
        writer, written = BackgroundWriter("log"), list[str]()
        for job in (write, lambda: 1 // 0, lambda: written.append("a line")):
            writer.submit(job)
        writer.close()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stderr.close()  # what it holds fits nowhere
    assert written == ["a line"]
    assert (writer.dropped, writer.failed) == (0, 2)
    if not full_stderr:
        err = capsys.readouterr().err
        assert err.count("No space left on device") == err.count("the run continues") == 1
        assert "log: 0 writes dropped and 2 failed" in err


def test_flushing_waits_for_the_jobs_so_far_but_not_for_a_disk_that_hangs() -> None:
    writer, written = BackgroundWriter("slow disk"), list[int]()
    writer.submit(lambda: written.append(1))
    assert writer.flush(PATIENCE)
    assert written == [1]
    released = hang(writer)
    assert not writer.flush(0.05)
    released.set()
    assert writer.flush(PATIENCE)
    writer.close()
    assert not writer.flush(0.05)
    assert not writer.submit(lambda: None)
    assert writer.dropped == 2, "both came after the end"


def test_a_warning_is_printable_and_a_closed_stderr_loses_only_the_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warn("'a\x1b[2J' was not written")
    assert capsys.readouterr() == ("", "nsa: 'a\\x1b[2J' was not written\n")
    (closed := io.StringIO()).close()
    monkeypatch.setattr("sys.stderr", closed)
    warn("lost")
