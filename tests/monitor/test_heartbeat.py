"""Heartbeats, the history that is read from them, and stacks on a signal."""

import io
import json
import math
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.monitor import heartbeat
from nsa.monitor.artifacts import MAX_HEARTBEAT_BYTES, last_beat, read_rank
from nsa.monitor.heartbeat import Heartbeat
from nsa.monitor.memory import memory_gb
from nsa.system import with_timeout
from nsa.watchdog.supervisor import open_heartbeats
from tests.disks import files_no_longer_than, freezable_disk, frozen
from tests.fork_server import Forked
from tests.monitor.run_folders import beats, read_heartbeats, write_beats
from tests.ranks import PATIENCE, spawn_ranks, wait_for

OFTEN = 0.01  # seconds between two progress lines


def beating(folder: Path, **changes: Any) -> Heartbeat:
    values: dict[str, Any] = {"rank": 0, "backend": "deepspeed-zero1", "seconds": OFTEN}
    return Heartbeat(folder, **{**values, **changes})


def path_of(folder: Path, rank: int = 0) -> Path:
    return folder / f"heartbeat_rank{rank}.jsonl"


def recorded_steps(folder: Path, event: str = "step_end") -> list[int]:
    return [beat["step"] for beat in read_heartbeats(folder).get(0, []) if beat["event"] == event]


def test_each_step_has_a_start_and_an_end_line_and_the_last_line_holds_the_status(
    tmp_path: Path,
) -> None:
    beat = beating(tmp_path, rank=3, seconds=100)
    for step in (1, 2):
        beat.step_start(step)
        beat.enter("forward", micro_step=1)
        beat.enter("step")
        beat.step_end(step, tokens=step * 4096, skipped=step - 1)
        beat.set_loss(5.0 / step)
    beat.close("finished")
    beats = read_heartbeats(tmp_path)[3]
    recorded = [(beat["event"], beat["step"], beat["tokens"], beat["skipped"]) for beat in beats]
    assert recorded == [
        ("start", 0, 0, 0),
        ("step_start", 0, 0, 0),
        ("step_end", 1, 4096, 0),
        ("step_start", 1, 4096, 0),
        ("step_end", 2, 8192, 1),
        ("end", 2, 8192, 1),
    ]
    assert [beat["phase"] for beat in beats[:3]] == ["setup", "setup", "step"]
    assert beats[-1]["status"] == "finished"
    assert beats[-1]["loss"] == 2.5
    assert all((beat["rank"], beat["pid"]) == (3, os.getpid()) for beat in beats)
    assert {beat["backend"] for beat in beats} == {"deepspeed-zero1"}
    assert {beat["host"] for beat in beats} == {platform.node()}


def test_the_first_line_of_a_resumed_run_holds_its_step(tmp_path: Path) -> None:
    """A gate at the resumed step must not wait for another step."""
    beat = beating(tmp_path, seconds=100, step=7, tokens=28_672, skipped=1)
    beat.set_loss(math.nan)  # which no reader of JSON would accept
    beat.close("finished")
    beats = read_heartbeats(tmp_path)[0]
    assert [beat["event"] for beat in beats] == ["start", "end"]
    assert {(beat["step"], beat["tokens"], beat["skipped"]) for beat in beats} == {(7, 28_672, 1)}
    assert beats[-1]["loss"] is None


def test_no_line_follows_the_end_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog would take a rank with a later line for one that is alive or was killed."""
    for rank in range(20):
        beat = beating(tmp_path, rank=rank, seconds=1e-4)
        time.sleep(0.002)
        beat.close("finished")
    late = beating(tmp_path, rank=20)
    close = late._writer.close

    def close_after_a_line(timeout: float) -> None:  # of a thread that was about to write it
        late.step_end(1, 2, 0)
        close(timeout)

    monkeypatch.setattr(late._writer, "close", close_after_a_line)
    late.close("finished")
    assert {beats[-1]["event"] for beats in read_heartbeats(tmp_path).values()} == {"end"}


def test_progress_lines_name_the_phase_while_the_training_thread_hangs_in_c(tmp_path: Path) -> None:
    beat = beating(tmp_path)
    reading, writing = os.pipe()

    def train() -> None:
        beat.step_start(7)
        beat.enter("forward", micro_step=2)
        os.read(reading, 1)  # blocks in the kernel

    def progress() -> list[dict[str, Any]]:
        beats = read_heartbeats(tmp_path).get(0, [])
        return [one for one in beats if one["event"] == "progress" and one["phase"] == "forward"]

    threading.Thread(target=train, daemon=True).start()
    wait_for(lambda: len(progress()) >= 5)
    seen = progress()
    os.write(writing, b"x")
    beat.close("finished")
    assert {(one["step"], one["micro_step"]) for one in seen} == {(6, 2)}
    since = [one["since"] for one in seen]
    assert since == sorted(since)
    assert since[0] < since[-1]
    assert seen[-1]["memory_gb"] > 0.01


def test_memory_is_read_once_in_each_position_because_a_hung_device_may_hold_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int | None] = []

    def memory(device: int | None) -> float:
        read.append(device)
        return memory_gb(device)

    def progress_lines(phase: str) -> int:
        beats = read_heartbeats(tmp_path).get(0, [])
        return sum((one["event"], one["phase"]) == ("progress", phase) for one in beats)

    monkeypatch.setattr(heartbeat, "memory_gb", memory)
    beat = beating(tmp_path)
    for phase in ("forward", "backward"):
        beat.enter(phase)
        wait_for(lambda phase=phase: progress_lines(phase) >= 5)
    beat.close("finished")
    assert 2 <= len(read) <= 3, "setup may have ended before the first line"


def test_progress_lines_hold_the_memory_and_the_utilization_of_the_training_threads_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def utilization(device: int) -> int:
        if len(asked) == 2:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        asked.append(device)
        return 25

    asked: list[int] = []
    gpu = SimpleNamespace(
        current_device=lambda: 3,
        utilization=utilization,  # percent
        max_memory_allocated=lambda device: 2e9 if device == 3 else 0,
    )
    for module in ("heartbeat", "memory"):
        monkeypatch.setattr(f"nsa.monitor.{module}.initialized_cuda", lambda: gpu)
    beat = beating(tmp_path)
    beat.step_start(1)
    wait_for(lambda: len(measured(tmp_path)) >= 3)
    beat.close("finished")
    assert measured(tmp_path)[:3] == [(2.0, 0.25), (2.0, 0.25), (2.0, None)]


def measured(folder: Path) -> list[tuple[float, float | None]]:
    """The memory and utilization of the progress lines since the first step began."""
    beats = read_heartbeats(folder).get(0, [])
    return [
        (one["memory_gb"], one["gpu_busy"])
        for one in beats
        if one["event"] == "progress" and one["memory_gb"]
    ]


def test_a_full_disk_causes_one_warning_and_delays_lines_without_tearing_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beat = beating(tmp_path)
    beat.step_end(1, 0, 0)
    assert beat.flush(PATIENCE)
    assert recorded_steps(tmp_path) == [1]
    with files_no_longer_than(path_of(tmp_path).stat().st_size + 100):
        for step in (2, 3):
            beat.step_end(step, 0, 0)
            assert not beat.flush(0.2), "the disk refuses it"
        assert path_of(tmp_path).read_bytes().endswith(b"\n")
    assert beat.flush(PATIENCE)
    assert recorded_steps(tmp_path) == [1, 2, 3]
    beat.close("finished")
    assert all(json.loads(line) for line in path_of(tmp_path).read_text().splitlines())
    err = capsys.readouterr().err
    assert err.count("a write failed, the run continues") == 1
    assert "lost" not in err


def test_a_disk_that_stays_full_loses_the_oldest_lines(tmp_path: Path) -> None:
    with files_no_longer_than(0):
        beat = beating(tmp_path, seconds=100)
        for step in range(1, 5_001):
            beat.step_end(step, 0, 0)
            if step % 500 == 0:
                assert not beat.flush(PATIENCE)
    beat.close("finished")
    kept = recorded_steps(tmp_path)
    assert kept == list(range(kept[0], 5_001))
    assert kept[0] > 1_000, "a line has some 300 bytes, a megabyte is kept"


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    with freezable_disk(tmp_path / "disk") as disk:
        beat = beating(disk, seconds=100)
        assert beat.flush(PATIENCE)
        with frozen(disk):
            with_timeout(PATIENCE / 2, lambda: beat.close("finished"))
        wait_for(lambda: read_heartbeats(disk)[0][-1]["event"] == "end")


def test_the_file_stays_open_so_that_the_watchdog_finds_the_runs_folder(tmp_path: Path) -> None:
    for rank in (0, 3, 12):  # on a second node no rank is 0
        beat = beating(tmp_path, rank=rank, seconds=100)
        assert beat.flush(PATIENCE)
        assert path_of(tmp_path, rank) in open_heartbeats(os.getpid())
        beat.close("finished")


def test_a_resumed_run_appends_after_a_torn_line(tmp_path: Path) -> None:
    for step in (1, 2):
        beat = beating(tmp_path, seconds=100)
        beat.step_end(step, 0, 0)
        beat.close("finished")
        with path_of(tmp_path).open("a") as file:
            file.write('{"time": 1, "event": "step_e')
    beats = read_heartbeats(tmp_path)[0]
    assert [beat["event"] for beat in beats] == 2 * ["start", "step_end", "end"]
    assert recorded_steps(tmp_path) == [1, 2]
    assert last_beat(path_of(tmp_path)) == beats[-1]


def test_the_newest_line_of_a_huge_file_is_found_at_its_end(tmp_path: Path) -> None:
    assert last_beat(path_of(tmp_path)) is None
    with path_of(tmp_path).open("wb") as file:
        file.truncate(2**40)  # a sparse file, too large to read
    beat = beating(tmp_path, seconds=100)
    beat.step_end(5, 0, 0)
    beat.close("finished")
    newest = last_beat(path_of(tmp_path))
    assert (newest["event"], newest["step"]) == ("end", 5)


def test_a_wall_clock_jump_does_not_change_durations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = beating(tmp_path, seconds=100)
    beat.enter("save")
    monkeypatch.setattr(time, "time", lambda: -1e9)
    beat.step_end(1, 0, 0)
    beat.close("finished")
    start, end = read_heartbeats(tmp_path)[0][:2]
    assert end["time"] < start["time"]
    assert end["mono"] >= start["mono"]
    assert 0 <= end["since"] < PATIENCE


def test_processes_of_one_run_add_up_to_one_history(tmp_path: Path) -> None:
    for start in (0, 2):
        heartbeat = Heartbeat(tmp_path, rank=1, backend="deepspeed-zero1", seconds=0.01, step=start)
        for step in range(start + 1, start + 3):
            heartbeat.step_start(step)
            heartbeat.enter("forward")
            heartbeat.step_end(step, tokens=64 * step, skipped=1)
        assert heartbeat.flush()
        history = read_rank(tmp_path, 1)
        assert (history.spans[-1], history.status) == ((start, start + 2), ""), "before the end"
        heartbeat.close("finished")
    history = read_rank(tmp_path, 1)
    assert (history.rank, history.step, history.spans) == (1, 4, [(0, 2), (2, 4)])
    assert (history.processes, history.status, history.skipped) == (2, "finished", 1)
    assert (history.backend, history.problem) == ("deepspeed-zero1", "")


def test_a_process_that_only_wrote_where_it_resumes_has_done_nothing(tmp_path: Path) -> None:
    """A killed run that resumes at 200 without having recorded steps 101 to 200."""
    late = beats(300, start=200, pid=900)
    late[0]["step"] = 0
    write_beats(tmp_path, beats(100), late[:1])
    assert read_rank(tmp_path, 0).step == 100, "the highest that was completed"
    write_beats(tmp_path, late[1:])
    assert read_rank(tmp_path, 0).spans == [(0, 100), (200, 300)]


def test_the_first_step_of_each_process_which_compiles_is_no_pause(tmp_path: Path) -> None:
    for start in (0, 3):
        lines = beats(start + 3, start=start, pid=100 + start)
        (first, *_) = [line for line in lines if line["phase"] == "backward"]
        first["since"] = 900.0
        write_beats(tmp_path, lines)
        assert read_rank(tmp_path, 0).pause == 0.1


class Blocks(io.FileIO):
    """A file that is read in blocks, into a buffer: a line of an unbuffered file is bytes."""

    def read(self, size: int | None = -1) -> bytes:
        raise AssertionError(f"it reads {size} bytes")


def test_only_the_highest_peaks_and_the_mean_utilization_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = beats(500)
    for line in lines:
        line["memory_gb"] = 10.0 + (line["step"] >= 200) - (line["step"] >= 300)
        line["gpu_busy"] = line["step"] / 500
    write_beats(tmp_path, lines)
    monkeypatch.setattr("nsa.monitor.artifacts.open_regular", lambda path, _: Blocks(path))
    history = read_rank(tmp_path, 0)
    assert history.memory == [(0, 10.0), (200, 11.0)]
    assert history.gpu_utilization == pytest.approx(0.5, abs=2e-3)
    assert len(json.dumps(asdict(history))) < 1_000, "ranks send it to each other"


def test_a_sparse_heartbeat_file_of_200_gb_is_not_read_and_named(tmp_path: Path) -> None:
    with (tmp_path / "heartbeat_rank0.jsonl").open("wb") as file:
        file.truncate(200 * 10**9)
    problem = read_rank(tmp_path, 0).problem
    assert problem.startswith("heartbeat_rank0.jsonl cannot be read: ")
    assert f"more than {MAX_HEARTBEAT_BYTES:,} bytes" in problem


# The sum never ends, holds the GIL and handles no signals.
STUCK_IN_C = """
import itertools
def count_forever():
    print("ready", flush=True)
    sum(itertools.repeat(1))  # line 8
count_forever()
"""
WAITING = """
import signal, threading, time
started = threading.Event()
def prefetch():
    started.set()
    threading.Event().wait()
threading.Thread(target=prefetch, daemon=True).start()
started.wait()
def stop(*_):
    print("stopped cleanly", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, stop)
def wait_forever():
    print("ready", flush=True)
    while True:
        time.sleep(100)
wait_forever()
"""


@contextmanager
def rank(run_dir: Path, code: str) -> Iterator[Forked]:
    """Start a process that dumps on the signal and runs `code`."""
    start = (
        "from pathlib import Path\nfrom nsa.monitor.heartbeat import dump_stacks_on_signal\n"
        f"dump_stacks_on_signal(Path({str(run_dir)!r}), 5)\n"
    )
    program = run_dir / "program.py"
    program.write_text(start + code)
    process = spawn_ranks(program, ranks=0).started[0]
    try:
        wait_for(lambda: process.text("out") == "ready\n", lambda: process.text("err"))
        yield process
    finally:
        process.kill_group()


def test_stacks_are_written_while_c_code_blocks_python(tmp_path: Path) -> None:
    with rank(tmp_path, STUCK_IN_C) as process:
        path = tmp_path / "stacks/rank5.txt"
        assert [entry.name for entry in path.parent.iterdir()] == ["rank5.txt"]
        assert path.read_text().startswith(f"-- stacks of process {process.pid}, started ")

        def found_counting() -> bool:
            process.kill(signal.SIGUSR1)  # the first may arrive before the counting starts
            return "line 8 in count_forever" in path.read_text()

        wait_for(found_counting)
        assert process.wait(0) is None


def test_each_signal_adds_a_dump_and_other_handlers_still_work(tmp_path: Path) -> None:
    path = tmp_path / "stacks/rank5.txt"

    def counted() -> list[int]:
        return [path.read_text().count(f"in {name}") for name in ("wait_forever", "prefetch")]

    with rank(tmp_path, WAITING) as process:
        for number in (1, 2):
            process.kill(signal.SIGUSR1)
            wait_for(lambda number=number: counted() == [number, number])  # of every thread
        process.kill(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert (process.text("out"), process.text("err")) == ("ready\nstopped cleanly\n", "")
    with rank(tmp_path, WAITING) as process:  # as a resumed run
        process.kill(signal.SIGUSR1)
        wait_for(lambda: counted() == [3, 3])
