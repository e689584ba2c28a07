"""A process that reads and tokenises for a rank, and the rank's end of the pipes to it.

    rank  --- what to do -->  worker    its standard input: where that ends, the rank has ended
    rank  <--- frames ------  worker    its standard output: what was made, signs of life, an error

It is started afresh and not forked: a rank holds a GPU, threads and connections by then. Frames
wait in the pipe, so a worker runs ahead by as much as fits there.
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

MADE, SIGN, FAILED = "made", "sign", "failed"  # the kinds of frames
SIGN_SECONDS = 0.5
LINES_KEPT = 5  # of what a worker said before it ended
Work = Callable[..., Iterator[Any]]  # called with `saw`; a function that pickle can name


class Worker(Iterator[Any]):
    """What `work` yields, in a process of its own."""

    def __init__(self, work: Work, name: str) -> None:
        self.source = ""  # which is being read, ...
        self.place = ""  # ... and its newest document
        self.heard = time.monotonic()  # when it last came further
        self._name = name  # as messages call it
        # The same modules as here, wherever this program was started from.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nsa.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._job, self._frames = self._process.stdin, self._process.stdout
        self._said: deque[str] = deque(maxlen=LINES_KEPT)
        self._listener = Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()
        with suppress(BrokenPipeError):  # it died already: the first frame's absence says so
            pickle.dump(work, self._job)
            self._job.flush()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def __next__(self) -> Any:
        while True:
            try:
                kind, content = pickle.load(self._frames)
            except (EOFError, pickle.UnpicklingError):  # between two frames, or within one
                raise self._death() from None
            self.heard = time.monotonic()
            if kind == MADE:
                return content
            if kind == FAILED:
                raise DataError(content)
            self.source, self.place = content

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        self._frames.close()
        with suppress(BrokenPipeError):
            self._job.close()

    def _listen(self, stream: BinaryIO) -> None:
        with stream:
            for line in stream:
                os.write(2, line)  # not through sys.stderr, whose lock a daemon thread may not hold
                self._said.append(line.decode(errors="replace").strip())

    def _death(self) -> DataError:
        code = self._process.wait()
        self._listener.join()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            how += ", as the system does where memory runs out: then lower data.shuffle_documents "
            how += "or data.workers"
        said = " | ".join(line for line in self._said if line)
        return DataError(f"{self._name}: its worker {how}; it last said: {said or 'nothing'}")


class _Frames:
    """The worker's end: what it makes, and between that where it stands, if it came further."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = Lock()
        self._seen: tuple[str, str] | None = None

    def send(self, kind: str, content: Any) -> None:
        frame = pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._stream.write(frame)
            self._stream.flush()

    def saw(self, source: str, place: str) -> None:
        self._seen = (source, place)

    def give_signs(self) -> None:
        told = None
        while True:
            if self._seen != told:
                told = self._seen
                self.send(SIGN, told)
            time.sleep(SIGN_SECONDS)


def main() -> None:
    """Do what standard input says, until it is done or whoever asked has ended."""
    frames = _Frames(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what libraries print must not get between the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, and ends this with it
    work = pickle.load(sys.stdin.buffer)
    for task in (_end_with_parent, frames.give_signs):
        Thread(target=task, daemon=True).start()
    try:
        for content in work(saw=frames.saw):
            frames.send(MADE, content)
    except DataError as error:
        frames.send(FAILED, str(error))
    except Exception as error:
        traceback.print_exc()
        frames.send(FAILED, f"the worker failed: {type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)  # the threads of libraries that stream do not all end in peace


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing more comes, so it returns where the pipe is closed
    os._exit(1)


if __name__ == "__main__":
    main()
