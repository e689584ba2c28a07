"""Data worker: a subprocess that reads and tokenises for a rank, connected by pipes.

    rank  -- pickled work --> worker   its stdin; end of file: the rank has ended
    rank  <---- frames ------ worker   its stdout: items, progress, or an error

It is a new process, not a fork: a rank already holds a GPU, threads and connections. Frames wait in
the pipe, so a worker prefetches as much as the pipe holds.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, BinaryIO

from nsa.data.source import DataError

ITEM, PROGRESS, ERROR, END = "item", "progress", "error", "end"  # kinds of frames
PROGRESS_SECONDS = 0.5
LINES_KEPT = 5  # last lines of a worker's stderr, for the error when it dies
Work = Callable[..., Iterator[Any]]  # called with `on_document`; must be picklable


class WorkerDied(DataError):
    """A worker process that was killed or crashed: no setting is wrong, a restart may succeed."""


class Worker(Iterator[Any]):
    """Iterator over `work` in a subprocess."""

    def __init__(self, work: Work, name: str) -> None:
        self.source = ""  # that is being read
        self.location = ""  # of the last document read
        self.last_progress = time.monotonic()
        self._name = name  # in messages
        # The worker imports the same modules as this process, whatever the working directory.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        # The worker ignores Ctrl-C and ends with its rank. It inherits the mask, so from the start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nsa.data.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
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
        while True:
            try:
                kind, content = pickle.load(self._frames)
            except (EOFError, pickle.UnpicklingError):  # the stream ended, maybe within a frame
                raise self._death() from None
            self.last_progress = time.monotonic()
            if kind == ITEM:
                return content
            if kind == END:
                raise StopIteration
            if kind == ERROR:
                raise DataError(content)
            self.source, self.location = content

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
    """Run the work on standard input until it or the parent ends; send progress regularly."""
    stream, lock = os.fdopen(os.dup(1), "wb"), Lock()
    os.dup2(2, 1)  # output of libraries must not mix with the frames
    newest: tuple[str, str] | None = None

    def send(kind: str, content: Any) -> None:
        frame = pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)
        with lock:
            stream.write(frame)
            stream.flush()

    def on_document(source: str, location: str) -> None:
        nonlocal newest
        newest = (source, location)

    def send_progress() -> None:
        sent = None
        while True:
            if newest != sent:
                sent = newest
                send(PROGRESS, sent)
            time.sleep(PROGRESS_SECONDS)

    work = pickle.load(sys.stdin.buffer)
    for task in (_exit_with_parent, send_progress):
        Thread(target=task, daemon=True).start()
    code = 0
    try:
        for item in work(on_document=on_document):
            send(ITEM, item)
        send(END, None)
    except DataError as error:
        send(ERROR, str(error))
    except BaseException:
        traceback.print_exc()  # the rank's error has its last lines
        code = 1
    sys.stderr.flush()
    os._exit(code)  # some threads of streaming libraries abort a regular exit


def _exit_with_parent() -> None:
    os.read(0, 1)  # returns at end of file
    os._exit(1)


if __name__ == "__main__":
    main()
