"""Where text comes from: a source yields documents, `open_split` turns them into one token stream.

documents (bytes)  ->  tokenizer  ->  | document | eos | document | eos | ...
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nsa.data.config import DataConfig
from nsa.data.tokenizer import build_tokenizer

SPLITS = ("train", "val")
HELD_OUT = 0.05  # share of the files that are the validation split

# What some distributions leave out or pack apart, ...
LEFT_OUT_FOLDERS = {"__pycache__", "dist-packages", "distutils", "ensurepip", "idlelib"}
LEFT_OUT_FOLDERS |= {"lib-dynload", "lib2to3", "macholib", "site-packages", "test", "tests"}
LEFT_OUT_FOLDERS |= {"tkinter", "turtledemo"}
# ... what programs wrote (code-page tables, and one file with all of the manual), ...
LEFT_OUT_FOLDERS |= {"encodings", "pydoc_data"}
# ... and what distributions and machines add.
LEFT_OUT_PREFIXES = ("_distutils", "_sysconfigdata", "config-", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class TokenStore:
    """One split as a single stream of tokens, in which `eos_id` ends every document."""

    tokens: npt.NDArray[np.integer]  # 1-D; may be a memmap
    eos_id: int
    bytes_per_token: float  # bytes of text that a token stands for, to turn loss into bits per byte


def open_split(config: DataConfig, split: str, seed: int = 0) -> TokenStore:
    """The tokens of one split, the same on every rank; `seed` matters to made-up text alone."""
    config.validate()
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: choose one of {', '.join(SPLITS)}")
    documents: Iterator[bytes]
    if config.source == "embedded":
        documents = (path.read_bytes() for path in embedded_files(split))
    else:
        documents = synthetic_documents(split, seed, config.synthetic_bytes)
    tokenizer = build_tokenizer(config)
    end = np.array([tokenizer.eos_id], dtype=np.uint16)
    pieces: list[npt.NDArray[np.uint16]] = []
    text_bytes = 0
    for document in documents:
        text_bytes += len(document)
        pieces += (tokenizer.encode(document), end)
    tokens = np.concatenate(pieces)
    return TokenStore(tokens, tokenizer.eos_id, text_bytes / len(tokens))


def embedded_files(split: str, root: Path | None = None) -> list[Path]:
    """The standard library's sources of one split, in the order of their relative paths.

    The held-out files are those whose paths hash lowest: a choice that no machine's order of
    listing, process or seed can change.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = sorted(_source_names(root))
    held_out = set(sorted(names, key=_digest)[: round(len(names) * HELD_OUT)])
    chosen = [root / name for name in names if (name in held_out) == (split == "val")]
    if not chosen:
        raise ValueError(
            f"data.source = 'embedded': no Python sources for split {split!r} in {root}; use a "
            "Python that ships its standard library as .py files, or data.source = 'synthetic'"
        )
    return chosen


def _source_names(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if _belongs(name)]
        for path in (Path(folder, name) for name in files if _belongs(name)):
            if path.suffix == ".py" and path.stat().st_size:
                yield path.relative_to(root).as_posix()


def _belongs(name: str) -> bool:
    return name not in LEFT_OUT_FOLDERS and not name.startswith(LEFT_OUT_PREFIXES)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def synthetic_documents(split: str, seed: int, size: int) -> Iterator[bytes]:
    """Made-up documents, `size` bytes in all: a loader without I/O, and a language to learn.

    One lexicon serves both splits, so spelling carries over to validation; a document keeps to a
    few words of its own, so there is something to look back for.
    """
    letters = stable_random(seed)
    lexicon = [
        letters.randint(ord("a"), ord("z") + 1, length).astype(np.uint8).tobytes()
        for length in letters.randint(2, 10, 1024)
    ]
    random = stable_random(seed, 1 + SPLITS.index(split))
    left = size
    while left > 0:
        topic = random.randint(0, len(lexicon), 32)
        words = topic[np.minimum(random.geometric(0.1, random.geometric(1 / 128)), 32) - 1]
        document = b" ".join([lexicon[word] for word in words])[:left]
        left -= len(document)
        yield document


def stable_random(seed: int, *stream: int) -> np.random.RandomState:
    """A generator whose numbers NumPy promises never to change, which `default_rng` does not."""
    if seed < 0:
        raise ValueError(f"train.seed = {seed}: must be 0 or more")
    bits = np.random.MT19937(np.random.SeedSequence((seed, *stream)))
    return np.random.RandomState(bits)
