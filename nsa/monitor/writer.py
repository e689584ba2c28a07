"""Background writers: threads with bounded queues, so that no step waits for an observer."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial, partialmethod
from typing import Any

from nsa.monitor.observer import Observer, warn


class BackgroundWriter:
    """Runs jobs one after the other on a daemon thread.

    Jobs that find the queue full are dropped and counted; jobs that raise are counted: a slow or
    full disk costs log lines, not the run. With a writer per destination, a destination that hangs
    does not block the others.
    """

    def __init__(self, name: str, capacity: int = 1024) -> None:
        self.name = name
        self.dropped = 0  # jobs that found the queue full, or were left at the end
        self.failed = 0  # jobs that raised
        self._closed = False
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=f"writer {name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> bool:
        """Queue `job` and return at once; False if it was dropped."""
        if not self._closed:
            with contextlib.suppress(queue.Full):
                self._jobs.put_nowait(job)
                return True
        self.dropped += 1
        if self.dropped == 1 and not self._closed:
            # In a thread, because stderr may be a file on the same slow disk.
            text = f"{self.name}: writing is slower than the run; dropping lines from here on"
            threading.Thread(target=warn, args=(text,), daemon=True).start()
        return False

    def flush(self, timeout: float = 10.0) -> bool:
        """Finish the jobs so far; return False if that takes longer than `timeout` seconds."""
        done = threading.Event()
        return self.submit(done.set) and done.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Finish the queue within `timeout` seconds, and warn of what was lost."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=timeout)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._jobs.mutex:
                self.dropped += sum(job is not None for job in self._jobs.queue) + 1
        if self.dropped or self.failed:
            warn(f"{self.name}: {self.dropped} writes dropped and {self.failed} failed in this run")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self.failed += 1
                if self.failed == 1:
                    warn(f"{self.name}: a write failed, the run continues: {error!r}")


class Observers(Observer):
    """Calls each observer on the thread of its writer, or at once if it has none.

    An observer without a writer is removed when it raises; writers report and count failures.
    """

    def __init__(self, observers: Iterable[tuple[Observer, BackgroundWriter | None]]) -> None:
        self._observers = list(observers)

    def close(self, timeout: float = 10.0) -> None:
        """Close the writers, all within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for _, writer in self._observers:
            if writer is not None:
                writer.close(max(0.0, deadline - time.monotonic()))

    def _call(self, callback: str, *values: Any) -> None:
        for observer, writer in list(self._observers):
            call = partial(getattr(observer, callback), *values)
            if writer is not None:
                writer.submit(call)
                continue
            try:
                call()
            except Exception as error:
                self._observers.remove((observer, writer))
                name = type(observer).__name__
                warn(f"{name} failed and is off for the rest of the run: {error!r}")


for _name in [name for name in vars(Observer) if name.startswith("on_")]:
    setattr(Observers, _name, partialmethod(Observers._call, _name))
