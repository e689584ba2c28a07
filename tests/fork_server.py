"""Starts Python programs in milliseconds: forks them from a process that has their modules.

    pytest  --- what to start --->  fork server  --- fork --->  rank 0, rank 1, ...
            <-- pids, exit codes --

A run's time would else be imports. What is forked is a real process: it has a process group,
files, environment and an exit code of its own, and is killed as any other. The server ends where
pytest ends, however that came about, and the kernel ends what it had started with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "nsa.engine.trainer",
    "nsa.data.builtin",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # part of DeepSpeed's initialize(), 3 seconds
)
PR_SET_PDEATHSIG = 1


class Server:
    """The tests' end: asks for processes and is told how they ended."""

    def __init__(self, preload: bool) -> None:
        """`preload` must be false where importing touches a GPU, which a fork would not survive."""
        ours, theirs = socket.socketpair()
        modules = PRELOADED if preload else ()
        environment = {
            name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # One thread: a library's threads would be missing in what is forked.
                env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                start_new_session=True,  # Ctrl-C is for pytest, and ends this with it
            )
        self._socket = ours
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        self._heard = b""

    def start(
        self, program: Path, *arguments: str, folder: Path, output: Path, env: dict[str, str]
    ) -> Forked:
        """Run a Python file in `folder`; its stdout and stderr go to output.out and output.err."""
        job = {
            "arguments": [str(program), *arguments],
            "folder": str(folder),
            "output": str(output),
            "env": env,
        }
        for suffix in (".out", ".err"):  # so that they can be read at once
            output.with_suffix(suffix).touch()
        self._socket.sendall(json.dumps(job).encode() + b"\n")
        while not self._started:
            self._hear()
        return Forked(self, self._started.pop(), output)

    def code(self, pid: int, timeout: float | None) -> int | None:
        """The exit code of a process, negative for a signal; None where it runs on."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            self._hear()
        return self._codes[pid]

    def _hear(self) -> None:
        received = self._socket.recv(1 << 16)
        if not received:
            raise RuntimeError(f"the fork server ended with code {self._process.wait()}")
        *lines, self._heard = (self._heard + received).split(b"\n")
        for line in lines:
            pid, code = json.loads(line)
            if code is None:
                self._started.append(pid)
            else:
                self._codes[pid] = code

    def close(self) -> None:
        """End the server, and with it all that it has started."""
        self._socket.close()
        self._process.wait()


class Forked(NamedTuple):
    """A started process."""

    server: Server
    pid: int
    output: Path

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, as subprocess gives it; None where it still runs after `timeout`."""
        return self.server.code(self.pid, timeout)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, if it is still there."""
        if self.wait(0) is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill it and what it has started, also where it has ended itself."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def text(self, stream: str) -> str:
        """What it has written so far, to "out" or to "err"."""
        return self.output.with_suffix(f".{stream}").read_text(errors="replace")


def serve(channel: socket.socket) -> dict[str, object]:
    """Fork a process for each line that comes; returns in the forked ones, with what to do."""
    wake_up, woken = socket.socketpair()
    for end in (wake_up, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked = b""
    while True:
        readable, _, _ = select.select([channel, wake_up], [], [])
        if wake_up in readable:
            wake_up.recv(4096)
            _tell_ends(channel)
        if channel not in readable:
            continue
        received = channel.recv(1 << 16)
        if not received:
            os._exit(0)
        asked += received
        while b"\n" in asked:
            line, asked = asked.split(b"\n", 1)
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != server:  # it ended before the kernel had been told
                    os._exit(1)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (channel, wake_up, woken):
                    end.close()
                return json.loads(line)
            _tell(channel, pid, None)


def _tell_ends(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(channel, pid, os.waitstatus_to_exitcode(status))


def _tell(channel: socket.socket, pid: int, code: int | None) -> None:
    """A process has started (code None), or has ended."""
    channel.sendall(json.dumps([pid, code]).encode() + b"\n")


def become(job: dict[str, object]) -> None:
    """Be the program that was asked for, as far as a fork can."""
    import random

    os.setsid()
    os.chdir(str(job["folder"]))
    output = str(job["output"])
    for number, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(output + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["env"])  # type: ignore[call-overload]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv = list(job["arguments"])  # type: ignore[call-overload]
    sys.path[0] = os.path.dirname(sys.argv[0])


def main() -> None:
    """The server's end."""
    import gc
    import importlib
    import runpy

    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if ops := sys.modules.get("deepspeed.ops"):
        _ = ops.__compatible_ops__  # found once: each process would ask compilers for it
    assert "huggingface_hub" not in sys.modules, "it reads its environment when it is imported"
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: what is forked would lack all but one"
    gc.collect()
    gc.freeze()  # what is there stays: looking through it again would cost each process a second
    become(serve(channel))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
