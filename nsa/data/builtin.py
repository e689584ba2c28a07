"""Built-in sources that need no download: Python's standard library, and synthetic documents."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nsa.data.source import DataError, Document, Reader, Source, State

SYNTHETIC_SEED = 0  # the same documents in every run

# Folders that some distributions omit or package separately.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "distutils", "ensurepip", "idlelib"}
SKIPPED_FOLDERS |= {"lib-dynload", "lib2to3", "macholib", "site-packages", "test", "tests"}
SKIPPED_FOLDERS |= {"tkinter", "turtledemo"}
# Generated code: code-page tables, and one file with the complete manual.
SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}
# Files that distributions and machines add.
SKIPPED_PREFIXES = ("_distutils", "_sysconfigdata", "config-", "sitecustomize", "usercustomize")


@dataclass(eq=False)
class ListSource:
    """A source that loads its documents by number."""

    name: str
    numbers: Sequence[int]
    load: Callable[[int], Document]

    def read(self, state: State | None = None) -> Reader:
        state = state or {"documents": 0}
        return Reader(self._documents(state["documents"]), state)

    def _documents(self, first: int) -> Iterator[tuple[Document, State]]:
        for count, number in enumerate(self.numbers[first:], first + 1):
            yield self.load(number), {"documents": count}

    def part(self, index: int, count: int) -> Source:
        return ListSource(self.name, self.numbers[index::count], self.load)

    def size(self) -> int | None:
        return None


def embedded(root: Path | None = None) -> Source:
    """Return the standard library's source files as documents, ordered by relative path."""
    root = root or Path(sysconfig.get_path("stdlib"))
    names = sorted(_source_names(root))
    if not names:
        raise DataError(
            f"data.source = 'embedded': no Python sources in {root}; use a Python that ships its "
            "standard library as .py files, or data.source = 'synthetic'"
        )
    return ListSource(
        "embedded",
        range(len(names)),
        lambda number: Document((root / names[number]).read_bytes(), names[number]),
    )


def _source_names(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if _included(name)]
        for path in (Path(folder, name) for name in files if _included(name)):
            if path.suffix == ".py" and path.stat().st_size:
                yield path.relative_to(root).as_posix()


def _included(name: str) -> bool:
    return name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)


def synthetic(size: int) -> Source:
    """Return generated documents, `size` bytes in total.

    Each document repeats a few words of one lexicon, so attention to earlier words lowers the loss.
    """
    texts = list(_synthetic_texts(size))
    return ListSource(
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
    """Return a generator whose numbers NumPy promises not to change, unlike `default_rng`."""
    bits = np.random.MT19937(np.random.SeedSequence((seed, *stream)))
    return np.random.RandomState(bits)
