"""Fork server: forked programs behave like started ones, and none outlives the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import fork_server
from tests.fork_server import ROOT, Forked, Server

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


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server without preloaded modules."""
    server = Server(preload=False)
    yield server
    server.close()


def start(server: Server, folder: Path, text: str, *arguments: str, **env: str) -> Forked:
    """Run the program `text`."""
    (folder / "program.py").write_text(text)
    output = folder / "output"
    return server.start(folder / "program.py", *arguments, folder=folder, output=output, env=env)


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("print('done')", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("import os; os._exit(7)", 7, ""),
        ("raise ValueError('no such thing')", 1, "ValueError: no such thing"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import signal; signal.raise_signal(signal.SIGINT)", -2, "KeyboardInterrupt"),
    ],
)
def test_the_exit_code_is_that_of_a_started_program(
    server: Server, tmp_path: Path, text: str, code: int, error: str
) -> None:
    forked = start(server, tmp_path, text)
    assert forked.wait(60) == code
    assert error in forked.text("err")
    started = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, cwd="/"
    )
    assert started.returncode == code


def test_a_program_gets_its_arguments_environment_and_folder_only(
    server: Server, tmp_path: Path
) -> None:
    text = "import os, sys; print(__name__, sys.argv[1:], dict(os.environ), os.getcwd())"
    forked = start(server, tmp_path, text, "--one", "2", RANK="1")
    assert forked.wait(60) == 0
    expected = f"__main__ ['--one', '2'] {{'RANK': '1'}} {tmp_path}\n"
    assert forked.text("out") == expected


def test_a_running_program_can_be_waited_for_and_killed(server: Server, tmp_path: Path) -> None:
    forked = start(server, tmp_path, "import time; time.sleep(600)")
    assert forked.wait(0.1) is None
    assert os.getpgid(forked.pid) == forked.pid, "a process group of its own"
    forked.kill()
    assert forked.wait(60) == -signal.SIGKILL
    forked.kill()  # no effect: it has ended


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
    wait_for_end(*pids)


def test_workers_share_the_imports_and_not_their_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that started the shared process may end first."""
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", f"of process {os.getpid()}")
    monkeypatch.setattr(fork_server, "PRELOADED", ("argparse",))
    text = "import os, sys; print('argparse' in sys.modules, os.getppid())"
    first, second = Server(preload=True), Server(preload=True)
    forked = [
        start(server, make(tmp_path / name), text) for server, name in ((first, "a"), (second, "b"))
    ]
    assert [x.wait(60) for x in forked] == [0, 0]
    outputs = [x.text("out").split() for x in forked]
    assert [x[0] for x in outputs] == ["True"] * 2
    assert outputs[0][1] != outputs[1][1], "each has its own server"
    sleeper = start(first, make(tmp_path / "c"), "import time; time.sleep(600)")
    first.close()
    wait_for_end(sleeper.pid)
    assert start(second, make(tmp_path / "d"), text).wait(60) == 0
    third = Server(preload=True)
    assert start(third, make(tmp_path / "e"), text).wait(60) == 0
    second.close()
    third.close()


def wait_for_end(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def alive(pid: int) -> bool:
    """Return whether a process runs; zombies do not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z"
    return False
