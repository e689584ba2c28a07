"""What worker processes are asked to do in tests: a function must be where they can import it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

Saw = Callable[[str, str], None]


def chatter(count: int, saw: Saw) -> Iterator[np.ndarray]:
    """Arrays, from among libraries that print."""
    for number in range(count):
        print("a progress bar", number)
        os.write(1, b"from C\n")
        saw("books", f"books.jsonl:{number}")
        yield np.full(50_000, number)


def die(saw: Saw) -> Iterator[int]:
    """One thing, and then an end as libraries in C have it."""
    yield 1
    print("the disk is on fire", file=sys.stderr)
    os.abort()


def fail(saw: Saw) -> Iterator[int]:
    """An error that nobody foresaw."""
    yield 1
    raise KeyError("no such thing")


def read_slowly(seconds: float, count: int, saw: Saw) -> Iterator[str]:
    """One thing, after documents that come one by one."""
    for number in range(count):
        saw("books", f"books.jsonl:{number}")
        time.sleep(seconds)
    yield "found"


def list_modules(saw: Saw) -> Iterator[list[str]]:
    """What a worker has imported before it knows what to do."""
    yield sorted(sys.modules)
