"""Built-in sources that need no download: installed Python files, and synthetic documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from nsa.data.source import Cursor, DataError, Document, Documents, Source

SYNTHETIC_SEED = 0  # the same documents in every run
WRITTEN_BY_SETUP = "git_version_info_installed.py"  # left out: it describes the machine


@dataclass(eq=False)
class ListSource(Source):
    """A source whose documents are loaded by number."""

    name: str
    count: int
    load: Callable[[int], Document]
    content: str = ""

    def read(self, cursor: Cursor | None = None) -> Documents:
        for number in range(cursor["documents"] if cursor else 0, self.count):
            yield self.load(number), {"documents": number + 1}


def embedded(package: str = "deepspeed") -> ListSource:
    """Return the Python files of an installed package.

    DeepSpeed is always installed, with the same files: it has no wheels per platform.
    """
    spec = find_spec(package) if package.isidentifier() else None  # imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"data.source = 'embedded:{package}': {package!r} is not an installed package; "
            "install it, or set data.source=synthetic"
        )
    name = "embedded" if package == "deepspeed" else f"embedded:{package}"
    return python_files(Path(spec.submodule_search_locations[0]), name)


def python_files(root: Path, name: str) -> ListSource:
    """Return the Python files below a folder, ordered by relative path."""
    paths = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.name != WRITTEN_BY_SETUP and path.stat().st_size
    )
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0".encode() + (root / path).read_bytes() + b"\0")
    return ListSource(
        name,
        len(paths),
        lambda number: Document((root / paths[number]).read_bytes(), paths[number]),
        digest.hexdigest(),
    )


def synthetic(size: int = 4_000_000) -> Source:
    """Return generated documents, `size` bytes in total.

    Each document repeats a few words of one lexicon, so attention to earlier words lowers the loss.
    """
    texts = list(_synthetic_texts(size))
    return ListSource(
        "synthetic",
        len(texts),
        lambda number: Document(texts[number], f"synthetic document {number}"),
    )


def _synthetic_texts(size: int) -> Iterator[bytes]:
    random = stable_random(SYNTHETIC_SEED)
    lexicon = [
        random.randint(ord("a"), ord("z") + 1, length).astype(np.uint8).tobytes()
        for length in random.randint(2, 10, 1024)
    ]
    random = stable_random(SYNTHETIC_SEED, 1)
    left = size
    while left > 0:
        topic = random.randint(0, len(lexicon), 32)
        count = random.geometric(1 / 128)  # words of the document
        number = np.minimum(random.geometric(0.1, count), len(topic)) - 1  # 0 is the most frequent
        words = topic[number]
        document = b" ".join([lexicon[word] for word in words])[:left]
        left -= len(document)
        yield document


def stable_random(seed: int, *stream: int) -> np.random.RandomState:
    """Return a generator whose numbers NumPy promises not to change, unlike `default_rng`."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, *stream))))
