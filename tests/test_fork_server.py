"""Fork server: forked programs behave like started ones, and none outlives the tests."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fork_server import ROOT, Server
from tests.ranks import alive

KILLED_TESTS = """
import os, sys, time
from pathlib import Path
from tests.fork_server import Server

here = Path(sys.argv[1])
server = Server(preload=False)
sleeper = server.start(here / "sleep.py", folder=here, output=here / "sleeper", env={})
print(server._process.pid, sleeper.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(7)", 7),
        ("raise ValueError('no such thing')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import signal; signal.raise_signal(signal.SIGINT)", -2),
    ],
)
def test_the_exit_code_is_that_of_a_started_program(tmp_path: Path, text: str, code: int) -> None:
    (program := tmp_path / "program.py").write_text(text)
    server = Server(preload=False)
    forked = server.start(program, folder=tmp_path, output=tmp_path / "output", env={})
    assert forked.wait(60) == code
    server.close()
    started = subprocess.run([sys.executable, program], capture_output=True, cwd="/")
    assert started.returncode == code


def test_nothing_outlives_killed_tests(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time; time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_TESTS, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    ) as tests:
        assert tests.stdout is not None
        pids = [int(pid) for pid in tests.stdout.readline().split()]
        assert all(alive(pid) for pid in pids)
        tests.kill()
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
