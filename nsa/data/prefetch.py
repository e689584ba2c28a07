"""A thread that keeps the next few things ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Generic, TypeVar

from nsa.data.source import DataError

T = TypeVar("T")
CLOSING_SECONDS = 5.0  # that a thread has to end; one that hangs in a file system does not


class Prefetcher(Generic[T]):
    """A thread that keeps the next few of `things` ready; an error comes after what came before."""

    def __init__(self, things: Iterator[T], depth: int) -> None:
        self.first_seconds: float | None = None
        self._things = things
        self._room = Semaphore(depth)
        self._ready: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        self._stopped = False
        self._opened = time.monotonic()
        self._thread = Thread(target=self._read, daemon=True, name="nsa data")
        self._thread.start()

    def take(self, seconds: float, heard: Callable[[], float] = lambda: 0.0) -> T:
        """The next thing; Empty once `seconds` passed since the call, and since `heard()`."""
        since = time.monotonic()
        while True:
            deadline = max(since, heard()) + seconds
            try:
                found = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                if max(since, heard()) + seconds > deadline:
                    continue
                raise
            if isinstance(found, Exception):
                self._ready.put(found)  # whoever asks again gets the same answer
                raise found
            self._room.release()
            return found[0]

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped = True
        self._room.release()

    def join(self) -> None:
        """Wait for the thread, which must have been stopped, and what it waits for ended."""
        self._thread.join(CLOSING_SECONDS)

    def _read(self) -> None:
        try:
            while True:
                self._room.acquire()
                if self._stopped:
                    return
                thing = next(self._things)
                if self.first_seconds is None:
                    self.first_seconds = time.monotonic() - self._opened
                self._ready.put((thing,))
        except DataError as error:
            self._ready.put(error)
        except Exception as error:  # a rank that alone raises another kind would leave the others
            wrapped = DataError(f"reading ahead failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._ready.put(wrapped)
