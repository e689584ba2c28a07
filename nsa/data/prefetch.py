"""Prefetcher: a background thread that keeps the next items of an iterator ready."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Generic, TypeVar

from nsa.data.source import DataError

T = TypeVar("T")
JOIN_SECONDS = 5.0  # a thread that hangs in a file system is abandoned after this


class Prefetcher(Generic[T]):
    """Up to `depth` items ready in advance; an error is raised after the items before it."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.first_seconds: float | None = None  # until the first item was ready
        self._items = items
        self._free = Semaphore(depth)
        self._ready: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        self._stopped = False
        self._opened = time.monotonic()
        self._thread = Thread(target=self._run, daemon=True, name="nsa data")
        self._thread.start()
        atexit.register(self._close)  # a thread inside PyTorch at Python's exit would abort it

    def next(self, timeout: float, last_progress: Callable[[], float] = lambda: 0.0) -> T:
        """Return the next item; raise Empty `timeout` seconds after the call or last progress."""
        start = time.monotonic()
        while True:
            deadline = max(start, last_progress()) + timeout
            try:
                item = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                if max(start, last_progress()) + timeout > deadline:
                    continue
                raise
            if isinstance(item, Exception):
                self._ready.put(item)  # later calls raise it too
                raise item
            self._free.release()
            return item[0]

    def stop(self) -> None:
        """Stop reading after the current item."""
        self._stopped = True
        self._free.release()

    def join(self) -> None:
        """Wait for the thread, after `stop` and once nothing blocks its current item."""
        atexit.unregister(self._close)
        self._thread.join(JOIN_SECONDS)

    def _close(self) -> None:
        self.stop()
        self.join()

    def _run(self) -> None:
        try:
            while True:
                self._free.acquire()
                if self._stopped:
                    return
                item = next(self._items)
                if self.first_seconds is None:
                    self.first_seconds = time.monotonic() - self._opened
                self._ready.put((item,))
        except DataError as error:
            self._ready.put(error)
        except Exception as error:  # all ranks handle a DataError together, but no other error
            wrapped = DataError(f"prefetching failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._ready.put(wrapped)
