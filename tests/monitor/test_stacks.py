from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ranks import PATIENCE, ROOT, wait_for

# The sum never ends, holds the GIL and handles no signals.
STUCK_IN_C = """
import itertools
def count_forever():
    print("ready", flush=True)
    sum(itertools.repeat(1))  # line 8
count_forever()
"""
WAITING = """
import signal, time
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
def rank(run_dir: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that dumps on the signal and runs `code`."""
    start = (
        "from pathlib import Path\nfrom nsa.monitor.heartbeat import dump_stacks_on_signal\n"
        f"dump_stacks_on_signal(Path({str(run_dir)!r}), 5)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_stacks_are_written_while_c_code_blocks_python(tmp_path: Path) -> None:
    with rank(tmp_path, STUCK_IN_C) as process:
        path = tmp_path / "stacks/rank5.txt"
        assert [entry.name for entry in path.parent.iterdir()] == ["rank5.txt"]
        assert path.read_text().startswith(f"-- stacks of process {process.pid}, started ")

        def found_counting() -> bool:
            process.send_signal(signal.SIGUSR1)  # the first may arrive before the counting starts
            return "line 8 in count_forever" in path.read_text()

        wait_for(found_counting)
        assert process.poll() is None


def test_each_signal_adds_a_dump_and_other_handlers_still_work(tmp_path: Path) -> None:
    path = tmp_path / "stacks/rank5.txt"
    with rank(tmp_path, WAITING) as process:
        for number in (1, 2):
            process.send_signal(signal.SIGUSR1)
            wait_for(lambda number=number: path.read_text().count("in wait_forever") == number)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=PATIENCE)
    assert (output, errors, process.returncode) == ("stopped cleanly\n", "", 0)
    with rank(tmp_path, WAITING):  # as a resumed run
        assert path.read_text().count("in wait_forever") == 2, "earlier dumps stay"
