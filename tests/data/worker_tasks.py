"""Tasks of worker processes in tests, in a module that they can import."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import numpy as np


def print_and_yield(count: int) -> Iterator[np.ndarray]:
    """Arrays, between the output of libraries that print."""
    for number in range(count):
        print("a progress bar", number)
        os.write(1, b"from C\n")
        yield np.full(50_000, number)


def abort() -> Iterator[int]:
    """One item, then a crash as in a C library."""
    yield 1
    print("the disk is on fire", file=sys.stderr)
    os.abort()


def fail() -> Iterator[int]:
    """One item, then an unexpected exception."""
    yield 1
    raise KeyError("no such key")


def read_slowly(seconds: float, count: int) -> Iterator[str]:
    """One item, after `count` documents at intervals."""
    for _ in range(count):
        time.sleep(seconds)
    yield "item"


def list_modules() -> Iterator[list[str]]:
    """What a worker has imported before it gets its task."""
    yield sorted(sys.modules)
