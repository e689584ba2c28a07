from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nsa.monitor.observer import BackgroundWriter
from tests.monitor.records import PATIENCE, drain


def test_everything_submitted_is_written_in_order_by_the_end(tmp_path: Path) -> None:
    writer = BackgroundWriter("log")
    with (tmp_path / "log").open("w") as file:
        for number in range(100):
            writer.submit(lambda number=number: file.write(f"{number}\n"))
        writer.close()
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(100)]
    assert (writer.dropped, writer.failed) == (0, 0)


def test_submitting_returns_while_a_write_hangs_and_dropped_jobs_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = BackgroundWriter("slow disk", capacity=2)
    hanging, released = threading.Event(), threading.Event()
    written: list[int] = []

    def hang() -> None:
        hanging.set()
        released.wait(PATIENCE)

    writer.submit(hang)
    assert hanging.wait(PATIENCE)
    answers: list[bool] = []
    training = threading.Thread(
        target=lambda: answers.extend(
            writer.submit(lambda number=number: written.append(number)) for number in range(5)
        ),
        daemon=True,
    )
    training.start()
    training.join(PATIENCE)
    assert not training.is_alive(), "submit waited for the hanging write"
    assert answers == [True, True, False, False, False]
    assert writer.dropped == 3

    released.set()
    writer.close()
    assert written == [0, 1]
    err = capsys.readouterr().err
    assert err.count("slow disk: writing is slower than the run") == 1
    assert "slow disk: 3 writes dropped and 0 failed" in err


def test_closing_gives_up_on_a_write_that_hangs_and_counts_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = BackgroundWriter("dead disk", capacity=8)
    released = threading.Event()
    writer.submit(lambda: released.wait(PATIENCE))
    writer.submit(lambda: None)
    closing = threading.Thread(target=lambda: writer.close(timeout=0.05), daemon=True)
    closing.start()
    closing.join(PATIENCE / 2)
    gave_up = not closing.is_alive()
    released.set()
    assert gave_up, "close waited for the hanging write"
    assert writer.dropped == 2
    assert "dead disk: 2 writes dropped" in capsys.readouterr().err


def test_a_job_after_closing_counts_as_dropped() -> None:
    writer = BackgroundWriter("log")
    writer.close()
    assert not writer.submit(lambda: None)
    assert writer.dropped == 1


def test_a_full_disk_costs_lines_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    writer = BackgroundWriter("log")

    def write() -> None:
        with open("/dev/full", "w") as file:
            file.write("a line\n")

    written: list[str] = []
    writer.submit(write)
    writer.submit(write)
    writer.submit(lambda: written.append("a line"))
    drain(writer)
    writer.close()
    assert written == ["a line"]
    assert (writer.dropped, writer.failed) == (0, 2)
    err = capsys.readouterr().err
    assert err.count("No space left on device") == 1
    assert "log: 0 writes dropped and 2 failed" in err


def test_flushing_waits_for_the_jobs_so_far_but_not_for_a_disk_that_hangs() -> None:
    writer, released = BackgroundWriter("slow disk"), threading.Event()
    written: list[int] = []
    writer.submit(lambda: written.append(1))
    assert writer.flush(PATIENCE)
    assert written == [1]
    writer.submit(lambda: released.wait(PATIENCE))
    assert not writer.flush(0.05)
    released.set()
    assert writer.flush(PATIENCE)
    writer.close()
    assert not writer.flush(0.05)
