"""Factory for `data.source`: `open_source` for documents, `open_store` for tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nsa.data.builtin import embedded, synthetic
from nsa.data.config import DataConfig
from nsa.data.files import Files, open_files
from nsa.data.hub import open_hub
from nsa.data.shards import is_prepared, open_shards
from nsa.data.source import (
    DataError,
    HeldOut,
    Source,
    is_builtin,
    is_path,
    no_documents,
    skipped_note,
)
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray, as_document, build_tokenizer

# A source has few documents if there are fewer than FEW_DOCUMENTS, and a hash is expected to hold
# out fewer than FEW_IN_VALIDATION of them: it may hold out none.
FEW_DOCUMENTS = 1_000
FEW_IN_VALIDATION = 5
VALIDATION_BYTES = 1 << 14  # held out of few documents: fits a sample of 2,048 tokens
MAX_IN_MEMORY_BYTES = 1 << 24  # few documents with more text are streamed


def open_source(config: DataConfig, name: str) -> Source:
    """Open one source of `data.source` as documents."""
    if name == "embedded" or name.startswith("embedded:"):
        return embedded(name.partition(":")[2] or "deepspeed")
    if name == "synthetic":
        return synthetic(config.synthetic_bytes)
    if name == "fineweb_edu" or name.startswith("hf:"):
        return open_hub(config, name)
    return open_files(Path(name).expanduser(), config.text_field, config.pattern, config.on_error)


def skipped_files(config: DataConfig) -> list[str]:
    """Return a line for each folder whose files are not all read."""
    paths = [name for name in config.sources() if is_path(name) and not is_prepared(name)]
    sources = [source for name in paths if isinstance(source := open_source(config, name), Files)]
    text = "{}: {:,} files are read; {:,} that are empty, binary or huge are not"
    return [text.format(s.name, len(s.files), s.skipped) for s in sources if s.skipped]


def held_out(config: DataConfig, name: str) -> HeldOut:
    """Return how a source is divided: by hash, or with few documents by the end of each."""
    size = _size_if_few(config, name)
    if not size:
        return HeldOut(config.held_out)
    return HeldOut(max(config.held_out, min(0.5, VALIDATION_BYTES / size)), by_position=True)


def is_indexed(name: str) -> bool:
    """Return whether a source is always a token store: built in or prepared, never streamed."""
    return is_builtin(name) or is_prepared(name)


def fits_in_memory(config: DataConfig, name: str) -> bool:
    """Return whether a source has few documents, small enough to be read into memory."""
    return 0 < (_size_if_few(config, name) or 0) <= MAX_IN_MEMORY_BYTES


def _size_if_few(config: DataConfig, name: str) -> int | None:
    """Return the bytes of text if there are few documents; a hub dataset is not counted."""
    if not is_path(name) or is_prepared(name):
        return None
    source = open_source(config, name)
    assert isinstance(source, Files)
    return source.size_if_few(min(FEW_DOCUMENTS, math.ceil(FEW_IN_VALIDATION / config.held_out)))


def open_store(config: DataConfig, name: str, split: str) -> TokenStore:
    """Open one split of one source as a token store."""
    return open_shards(name, split) if is_prepared(name) else tokenise(config, name, split)


def tokenise(
    config: DataConfig,
    name: str,
    split: str,
    tokens: float = math.inf,
    on_document: Callable[[str, str], None] = lambda name, location: None,
) -> TokenStore:
    """Tokenise the first documents of one split of a source, until they have `tokens` tokens."""
    tokenizer = build_tokenizer(config)
    pieces: list[TokenArray] = []
    text_bytes = count = 0
    division = held_out(config, name)
    reader = open_source(config, name).read()
    for document in reader:
        on_document(name, document.location)
        if text := division.text_for(document.text, split):
            pieces.append(as_document(tokenizer, tokenizer.encode(text)))
            text_bytes, count = text_bytes + len(text), count + len(pieces[-1])
            if count >= tokens:
                break
    notes = skipped_note(name, reader.skipped)
    if not pieces:
        raise DataError("; ".join([str(no_documents(config, name, split)), *notes]))
    joined = np.concatenate(pieces)
    return TokenStore(
        [joined],
        tokenizer.eos_id,
        text_bytes / count,
        name=name,
        fingerprint=hashlib.sha256(joined.astype(np.uint32).tobytes()).hexdigest(),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        notes=notes,
    )
