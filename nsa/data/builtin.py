"""Text that is always at hand: Python's standard library, and made-up documents."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from nsa.data.source import DataError, Document, Reader, Source, State

SYNTHETIC_SEED = 0  # the same text in every run, so that runs compare

# What some distributions leave out or pack apart, ...
LEFT_OUT_FOLDERS = {"__pycache__", "dist-packages", "distutils", "ensurepip", "idlelib"}
LEFT_OUT_FOLDERS |= {"lib-dynload", "lib2to3", "macholib", "site-packages", "test", "tests"}
LEFT_OUT_FOLDERS |= {"tkinter", "turtledemo"}
# ... what programs wrote (code-page tables, and one file with all of the manual), ...
LEFT_OUT_FOLDERS |= {"encodings", "pydoc_data"}
# ... and what distributions and machines add.
LEFT_OUT_PREFIXES = ("_distutils", "_sysconfigdata", "config-", "sitecustomize", "usercustomize")


class Listed:
    """A source that knows how many documents it has and can get at any of them."""

    def __init__(self, name: str, numbers: Sequence[int], get: Callable[[int], Document]) -> None:
        self.name = name
        self._numbers = numbers
        self._get = get

    def read(self, state: State | None = None) -> Reader:
        return _ListedReader(self._numbers, self._get, state["documents"] if state else 0)

    def part(self, index: int, count: int) -> Source:
        return Listed(self.name, self._numbers[index::count], self._get)

    def size(self) -> int | None:
        return None


class _ListedReader:
    def __init__(self, numbers: Sequence[int], get: Callable[[int], Document], given: int) -> None:
        self._numbers, self._get, self._given = numbers, get, given

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Document:
        if self._given >= len(self._numbers):
            raise StopIteration
        self._given += 1
        return self._get(self._numbers[self._given - 1])

    def state(self) -> State:
        return {"documents": self._given}


def embedded(root: Path | None = None) -> Source:
    """The standard library's sources, a document each, in the order of their relative paths."""
    root = root or Path(sysconfig.get_path("stdlib"))
    names = sorted(_source_names(root))
    if not names:
        raise DataError(
            f"data.source = 'embedded': no Python sources in {root}; use a Python that ships its "
            "standard library as .py files, or data.source = 'synthetic'"
        )
    return Listed(
        "embedded",
        range(len(names)),
        lambda number: Document((root / names[number]).read_bytes(), names[number]),
    )


def _source_names(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if _belongs(name)]
        for path in (Path(folder, name) for name in files if _belongs(name)):
            if path.suffix == ".py" and path.stat().st_size:
                yield path.relative_to(root).as_posix()


def _belongs(name: str) -> bool:
    return name not in LEFT_OUT_FOLDERS and not name.startswith(LEFT_OUT_PREFIXES)


def synthetic(size: int) -> Source:
    """Made-up documents, `size` bytes in all: a loader without I/O, and a language to learn.

    A document keeps to a few words of one lexicon, so that there is something to look back for.
    """
    texts = list(_synthetic_texts(size))
    return Listed(
        "synthetic",
        range(len(texts)),
        lambda number: Document(texts[number], f"synthetic document {number}"),
    )


def _synthetic_texts(size: int) -> Iterator[bytes]:
    letters = stable_random(SYNTHETIC_SEED)
    lexicon = [
        letters.randint(ord("a"), ord("z") + 1, length).astype(np.uint8).tobytes()
        for length in letters.randint(2, 10, 1024)
    ]
    random = stable_random(SYNTHETIC_SEED, 1)
    left = size
    while left > 0:
        topic = random.randint(0, len(lexicon), 32)
        words = topic[np.minimum(random.geometric(0.1, random.geometric(1 / 128)), 32) - 1]
        document = b" ".join([lexicon[word] for word in words])[:left]
        left -= len(document)
        yield document


def stable_random(seed: int, *stream: int) -> np.random.RandomState:
    """A generator whose numbers NumPy promises never to change, which `default_rng` does not."""
    bits = np.random.MT19937(np.random.SeedSequence((seed, *stream)))
    return np.random.RandomState(bits)
