"""Data worker: a subprocess that reads and tokenises, connected by pipes.

    parent  -- pickled work --> worker   its stdin; end of file: the parent has ended
    parent  <---- frames ------ worker   its stdout: items, or an error

It is a new process, not a fork: a rank already holds a GPU, threads and connections.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any, BinaryIO

from nsa.data.source import DataError

ITEM, ERROR, END = "item", "error", "end"  # kinds of frames
LINES_KEPT = 5  # last lines of a worker's stderr, for the error when it dies
Work = Callable[[], Iterator[Any]]  # must be picklable


class WorkerDied(DataError):
    """A worker process that was killed or crashed: no setting is wrong, a restart may succeed."""


class Worker(Iterator[Any]):
    """Iterator over `work` in a subprocess."""

    def __init__(self, work: Work, name: str, *keep_open: int) -> None:
        """Start the process; `keep_open`: files that it inherits under the same numbers."""
        self._name = name  # in messages
        # The worker imports the same modules as this process, whatever the working directory.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        # The worker ignores Ctrl-C and ends with its parent. The mask is inherited from the start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nsa.data.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                pass_fds=keep_open,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._frames = self._process.stdin, self._process.stdout
        self._last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._forwarder = Thread(target=self._forward, args=(self._process.stderr,), daemon=True)
        self._forwarder.start()
        with suppress(BrokenPipeError):  # the worker died, which the first read reports
            pickle.dump(work, self._stdin)
            self._stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __next__(self) -> Any:
        try:
            kind, content = pickle.load(self._frames)
        except (EOFError, pickle.UnpicklingError):  # the stream ended, maybe within a frame
            raise self._death() from None
        if kind == ERROR:
            raise content
        if kind == END:
            raise StopIteration
        return content

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._forwarder.join()
        self._frames.close()
        with suppress(BrokenPipeError):
            self._stdin.close()

    def _forward(self, stderr: BinaryIO) -> None:
        with stderr:
            for line in stderr:
                os.write(2, line)  # a daemon thread must not hold the lock of sys.stderr
                self._last_lines.append(line.decode(errors="replace").strip())

    def _death(self) -> WorkerDied:
        code = self._process.wait()
        self._forwarder.join()
        cause = f"ended with exit code {code}"
        if code < 0:
            cause = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            cause += ", possibly out of memory"
        lines = " | ".join(line for line in self._last_lines if line)
        return WorkerDied(f"{self._name}: its worker {cause}; last output: {lines or 'none'}")


def main() -> None:
    """Run the work on standard input until it or the parent ends."""
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the frames

    def send(kind: str, content: Any) -> None:
        pickle.dump((kind, content), stream, pickle.HIGHEST_PROTOCOL)
        stream.flush()

    work = pickle.load(sys.stdin.buffer)
    Thread(target=_exit_with_parent, daemon=True).start()
    code = 0
    try:
        for item in work():
            send(ITEM, item)
        send(END, None)
    except DataError as error:
        send(ERROR, type(error)(str(error)))
    except BaseException:
        traceback.print_exc()  # the parent's error has its last lines
        code = 1
    sys.stderr.flush()
    os._exit(code)  # some threads of streaming libraries abort a regular exit


def _exit_with_parent() -> None:
    os.read(0, 1)  # returns at end of file
    os._exit(1)


if __name__ == "__main__":
    main()
