"""Fork server: starts Python programs in milliseconds from a process with their modules imported.

    pytest  --- connects ----->  fork server  --- fork --->  parent of this pytest's ranks
            --- job ----------------------------------------->  --- fork --->  rank 0, rank 1, ...
            <-- pids, codes ----------------------------------

Most of a short run's time is imports: all workers of pytest-xdist share one server. A forked
program is a real process: it has its own process group, files, environment and exit code, and can
be killed. The server ends when pytest ends, even when killed, and the kernel then ends what it
started; a worker that ends takes its ranks with it.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "nsa.engine.recipe",
    "nsa.engine.trainer",
    "nsa.data.builtin",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "torch.utils.serialization",
    "matplotlib.backends.backend_agg",
    # Imported by deepspeed.initialize(), which would take 3 seconds.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
PR_SET_PDEATHSIG = 1


class Server:
    """The process with the imported modules; it imports them for the first connection."""

    def __init__(self, preload: bool) -> None:
        """`preload` must be False if imports touch a GPU, which does not survive a fork."""
        self._folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        self.address = str(Path(self._folder.name) / "socket")
        self._owner, theirs = socket.socketpair()
        environment = {
            name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
        }
        modules = PRELOADED if preload else ()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            ours = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, *map(str, ours), *modules],
                pass_fds=ours,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # One thread: a forked process would lack the others.
                env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                start_new_session=True,  # Ctrl-C goes to pytest, whose end also ends the server
            )

    def close(self) -> None:
        self._owner.close()
        self._process.wait()
        self._folder.cleanup()


class Connection:
    """The tests' end of a connection to the server."""

    def __init__(self, address: str) -> None:
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        self._received = b""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)

    def start(
        self, program: Path, *arguments: str, folder: Path, output: Path, env: dict[str, str]
    ) -> "Forked":
        """Run a Python file in `folder`; its stdout and stderr go to output.out and output.err."""
        job = {
            "arguments": [str(program), *arguments],
            "folder": str(folder),
            "output": str(output),
            "env": env,
        }
        for suffix in (".out", ".err"):  # readable at once
            output.with_suffix(suffix).touch()
        self._socket.sendall(json.dumps(job).encode() + b"\n")
        while not self._started:
            self._receive()
        return Forked(self, self._started.pop(), output)

    def code(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit code of a process, negative for a signal; None while it runs."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], seconds)[0]:
                return None
            self._receive()
        return self._codes[pid]

    def _receive(self) -> None:
        received = self._socket.recv(1 << 16)
        if not received:
            raise RuntimeError("the fork server ended; its error is above")
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            pid, code = json.loads(line)
            if code is None:
                self._started.append(pid)
            else:
                self._codes[pid] = code

    def close(self) -> None:
        """End all processes that this connection started."""
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(1 << 16):  # until their parent has ended
            pass
        self._socket.close()


class Forked(NamedTuple):
    connection: Connection
    pid: int
    output: Path

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code as subprocess does; None if it still runs after `timeout`."""
        return self.connection.code(self.pid, timeout)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal unless the process has ended."""
        if self.wait(0) is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process and its children, which may outlive it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def text(self, stream: str) -> str:
        """Return what the process has written so far to "out" or "err"."""
        return self.output.with_suffix(f".{stream}").read_text(errors="replace")


def serve(channel: socket.socket) -> dict[str, object]:
    """Fork a process for each received line; returns only in the forked ones, with their job."""
    wake_up, woken = socket.socketpair()
    for end in (wake_up, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pending = b""
    while True:
        readable, _, _ = select.select([channel, wake_up], [], [])
        if wake_up in readable:
            wake_up.recv(4096)
            _report_exits(channel)
        if channel not in readable:
            continue
        received = channel.recv(1 << 16)
        if not received:
            os._exit(0)
        pending += received
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != server:  # it ended before prctl
                    os._exit(1)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (channel, wake_up, woken):
                    end.close()
                return json.loads(line)
            _report(channel, pid, None)


def _report_exits(channel: socket.socket) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _report(channel, pid, os.waitstatus_to_exitcode(status))


def _report(channel: socket.socket, pid: int, code: int | None) -> None:
    """Report a process that started (code None) or ended."""
    channel.sendall(json.dumps([pid, code]).encode() + b"\n")


def set_up(job: dict[str, object]) -> None:
    """Give a forked process the session, folder, output, environment and arguments of its job."""
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


def preload(modules: list[str]) -> None:
    """Import what forked programs need."""
    import functools
    import gc
    import importlib

    for name in modules:
        importlib.import_module(name)
    if ops := sys.modules.get("deepspeed.ops"):
        _ = ops.__compatible_ops__  # cached: computing it calls compilers
    if builtin := sys.modules.get("nsa.data.builtin"):
        builtin.python_files = functools.cache(builtin.python_files)
        builtin.embedded("deepspeed")  # with the digest of its files
    assert "huggingface_hub" not in sys.modules, "it reads its environment when it is imported"
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a forked process would lack all but one"
    gc.collect()
    gc.freeze()  # else each process spends a second collecting the imported modules


def accept(owner: socket.socket, listener: socket.socket, modules: list[str]) -> socket.socket:
    """Fork a process for each connection; returns only in these, with their connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    loaded = False
    while True:
        readable, _, _ = select.select([owner, listener], [], [])
        if owner in readable:  # it has ended
            os._exit(0)
        if not loaded:
            preload(modules)
            loaded = True
        channel, _ = listener.accept()
        with channel:
            if os.fork() == 0:
                owner.close()
                listener.close()
                return channel.dup()


def main() -> None:
    """The server's end of the connections."""
    import runpy

    owner, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    set_up(serve(accept(owner, listener, sys.argv[3:])))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
