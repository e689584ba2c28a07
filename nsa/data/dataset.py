"""Dataset: `data.source`, opened once and passed on to all that read it.

    open_dataset(config)  ->  Dataset  ->  loader, validation, `nsa data prepare`, `nsa eval`

It is passed on to worker processes too, which open the documents again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nsa.data.builtin import embedded, synthetic
from nsa.data.config import DataConfig
from nsa.data.files import Files, open_files
from nsa.data.hub import open_hub
from nsa.data.shards import is_prepared, open_shards
from nsa.data.source import DataError, HeldOut, Source, is_builtin, is_path, no_documents
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray, build_tokenizer

OnDocument = Callable[[str, str], None]  # called with (source, location of its newest document)
NO_DOCUMENT = "none yet"
# A source has few documents if there are fewer than FEW_DOCUMENTS, and a hash is expected to hold
# out fewer than FEW_IN_VALIDATION of them: it may hold out none.
FEW_DOCUMENTS = 1_000
FEW_IN_VALIDATION = 5
VALIDATION_BYTES = 1 << 14  # held out of few documents: fits a sample of 2,048 tokens
MAX_IN_MEMORY_BYTES = 1 << 24  # few documents with more text are streamed


@dataclass
class OpenedSource:
    """One source of `data.source`: its documents, and how they are divided."""

    config: DataConfig
    name: str
    division: HeldOut
    is_prepared: bool  # a folder of shards, which were divided when they were written
    fits_in_memory: bool = False  # few documents, which need not be streamed

    @cached_property
    def documents(self) -> Source:
        return open_source(self.config, self.name)

    @property
    def files(self) -> Files | None:
        """Local documents; None if it is prepared, built in, or of the hub."""
        if self.is_prepared or not is_path(self.name):
            return None
        assert isinstance(self.documents, Files)
        return self.documents

    @property
    def is_indexed(self) -> bool:
        """Whether it is always a token store, never streamed."""
        return self.is_prepared or is_builtin(self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "documents"}


@dataclass(frozen=True)
class Dataset:
    """The sources of `data.source`; `config` decides how they are tokenised and packed."""

    config: DataConfig
    sources: list[OpenedSource]

    @property
    def notes(self) -> list[str]:
        """A line for each folder whose files are not all read."""
        text = "{}: {:,} files are read; {:,} that are empty, binary or huge are not"
        return [
            text.format(files.name, len(files.files), files.left_out)
            for source in self.sources
            if (files := source.files) is not None and files.left_out
        ]

    def stores(
        self,
        split: str,
        tokens: float = math.inf,
        on_document: OnDocument = lambda source, location: None,
    ) -> Iterator[TokenStore]:
        """Yield one split of each source as a token store.

        Documents are tokenised from the first on, until they have `tokens` tokens. Sources are not
        divided into parts, so the result does not depend on the number of ranks.
        """
        for source in self.sources:
            if source.is_prepared:
                yield open_shards(source.name, split)
                continue
            on_document(source.name, NO_DOCUMENT)
            tokenizer = build_tokenizer(self.config)
            pieces: list[TokenArray] = []
            text_bytes = count = 0
            reader = source.documents.read()
            for document in reader:
                on_document(source.name, document.location)
                if text := source.division.text_for(document.text, split):
                    pieces += tokenizer.encode_documents([text])
                    text_bytes, count = text_bytes + len(text), count + len(pieces[-1])
                    if count >= tokens:
                        break
            notes = reader.skipped.note(source.name)
            if not pieces:
                error = no_documents(self.config, source.name, split)
                raise DataError("; ".join([str(error), *notes]))
            joined = np.concatenate(pieces)
            yield TokenStore(
                [joined],
                tokenizer.eos_id,
                text_bytes / count,
                name=source.name,
                fingerprint=hashlib.sha256(joined.astype(np.uint32).tobytes()).hexdigest(),
                vocab_size=tokenizer.vocab_size,
                tokenizer=tokenizer.name,
                tokenizer_fingerprint=tokenizer.fingerprint,
                notes=notes,
            )


def open_dataset(config: DataConfig) -> Dataset:
    """Open the sources of `data.source`; read up to FEW_DOCUMENTS of a local one to count them."""
    sources = []
    for name in config.sources():
        source = OpenedSource(config, name, HeldOut(config.held_out), is_prepared(name))
        if (files := source.files) is not None:
            limit = min(FEW_DOCUMENTS, math.ceil(FEW_IN_VALIDATION / config.held_out))
            if size := files.size_if_few(limit):
                # The end of each document is held out: a hash may hold out none.
                fraction = max(config.held_out, min(0.5, VALIDATION_BYTES / size))
                source.division = HeldOut(fraction, by_position=True)
                source.fits_in_memory = size <= MAX_IN_MEMORY_BYTES
        sources.append(source)
    return Dataset(config, sources)


def open_source(config: DataConfig, name: str) -> Source:
    """Open one source of `data.source` as documents."""
    if name == "embedded" or name.startswith("embedded:"):
        return embedded(name.partition(":")[2] or "deepspeed")
    if name == "synthetic":
        return synthetic()
    if name == "fineweb_edu" or name.startswith("hf:"):
        return open_hub(config, name)
    return open_files(Path(name).expanduser(), config.text_field, config.pattern, config.on_error)
