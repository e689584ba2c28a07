"""Streaming token rows: documents are read, shuffled in blocks, tokenised and packed on the fly.

    one part of the source  ->  blocks of documents, each shuffled  ->  | document | eos | ...
                                                                        |--- row ---|
                                                                                    |--- row ---|

A cursor is where the next row begins: the block, the reader's state before it, and how much of it
was consumed. Resuming reads that block again, so no text is saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nsa.data.config import DataConfig
from nsa.data.factory import open_source
from nsa.data.order import Mixer, key, shuffled
from nsa.data.source import DataError, Reader, State, in_split, is_validation, no_documents
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray, Tokenizer, build_tokenizer, with_eos

OnDocument = Callable[[str, str], None]  # called with (source, location of its newest document)
NO_DOCUMENT = "none yet"
DOCUMENTS_PER_CALL = 64  # enough to keep a tokenizer's threads busy


def stream_rows(config: DataConfig, **arguments: Any) -> Iterator[tuple[TokenArray, State]]:
    """The endless output of one worker: rows of a `PackedStream`, and the state after them."""
    stream = PackedStream(config, **arguments)
    while True:
        yield next(stream), stream.state()


class PackedStream(Iterator[TokenArray]):
    """Endless rows [rows, T + 1] from one of `parts` parts of `data.source`.

    A row begins with the last token of its source's previous row. A mixture gives each source its
    fraction of the rows.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        part: int,
        parts: int,
        rows: int,
        state: State | None = None,
        on_document: OnDocument = lambda source, location: None,
    ) -> None:
        fractions = config.sources()
        cursors = state["sources"] if state else {}
        self._seq_len, self._rows = config.seq_len, rows
        self._consumed = state["rows"] if state else 0
        # Every part mixes its own rows: with one order for all parts, parts taking turns could
        # fall in step with the weights, so that a part never reads one of its sources.
        self._mixer = Mixer(list(fractions.values()), list(fractions))
        tokenizer = build_tokenizer(config)
        self._streams = {
            name: _SourceStream(
                config,
                name,
                tokenizer,
                seed=seed,
                part=part,
                parts=parts,
                cursor=cursors.get(name),
                on_document=on_document,
            )
            for name in fractions
        }
        self._in_order = list(self._streams.values())

    def __next__(self) -> TokenArray:
        return np.stack([self._row() for _ in range(self._rows)])

    def _row(self) -> TokenArray:
        source, _ = self._mixer.locate(self._consumed)
        self._consumed += 1
        return self._in_order[source].row(self._seq_len)

    def state(self) -> State:
        """Where the next row begins; another stream of the same part resumes from it."""
        cursors = {name: stream.cursor() for name, stream in self._streams.items()}
        return {"rows": self._consumed, "sources": cursors}


class _SourceStream:
    """The endless tokens of one part of one source, in windows."""

    def __init__(
        self,
        config: DataConfig,
        name: str,
        tokenizer: Tokenizer,
        *,
        seed: int,
        part: int,
        parts: int,
        cursor: State | None,
        on_document: OnDocument,
    ) -> None:
        self._config, self._name, self._tokenizer = config, name, tokenizer
        self._seed, self._part, self._parts = seed, part, parts
        self._on_document = on_document
        self._source = open_source(config, name).part(part, parts)
        self._newest = NO_DOCUMENT
        self._start = cursor or {"pass": 0, "block": 0, "reader": None, "document": 0, "token": 0}
        self._pending: deque[tuple[State, TokenArray]] = deque()  # (cursor, tokens) of documents
        self._pending_tokens = 0
        self._documents = self._tokenised()

    def row(self, length: int) -> TokenArray:
        """The next `length` tokens and the one after them, with which the next row begins."""
        while self._pending_tokens <= length:
            cursor, tokens = next(self._documents)
            self._pending.append((cursor, tokens))
            self._pending_tokens += len(tokens)
        pieces, missing = [], length + 1
        for _, tokens in self._pending:
            pieces.append(tokens[:missing])
            missing -= len(pieces[-1])
            if not missing:
                break
        self._drop(length)
        return np.concatenate(pieces)

    def _drop(self, count: int) -> None:
        self._pending_tokens -= count
        while count >= len(self._pending[0][1]):
            count -= len(self._pending.popleft()[1])
        cursor, tokens = self._pending[0]
        self._pending[0] = {**cursor, "token": cursor["token"] + count}, tokens[count:]

    def cursor(self) -> State:
        """Where the next row begins."""
        return self._pending[0][0] if self._pending else self._start

    def _tokenised(self) -> Iterator[tuple[State, TokenArray]]:
        """Each document's cursor and its tokens with eos, from where the stream starts."""
        number, block, before = (self._start[name] for name in ("pass", "block", "reader"))
        document, token = self._start["document"], self._start["token"]
        while True:
            reader = self._source.read(before)
            while texts := self._block(reader):
                cursor = {"pass": number, "block": block, "reader": before}
                for index, tokens in self._encode(self._shuffle(texts, number, block), document):
                    yield {**cursor, "document": index, "token": token}, tokens[token:]
                    token = 0
                document, block, before = 0, block + 1, reader.state()
            if block == 0:
                raise self._no_documents()
            number, block, before = number + 1, 0, None

    def _block(self, reader: Reader) -> list[bytes]:
        """The next training documents: `data.shuffle_documents`, or fewer at the end of a pass."""
        texts: list[bytes] = []
        self._on_document(self._name, self._newest)
        while len(texts) < self._config.shuffle_documents:
            document = next(reader, None)
            if document is None:
                break
            self._newest = document.location
            self._on_document(self._name, self._newest)
            if not is_validation(document.text, self._config.held_out):
                texts.append(document.text)
        return texts

    def _shuffle(self, texts: list[bytes], number: int, block: int) -> list[bytes]:
        """A different order in each block of each pass."""
        shuffle_key = key(self._seed, "documents", self._part, number, block)
        return [texts[shuffled(index, len(texts), shuffle_key)] for index in range(len(texts))]

    def _encode(self, texts: list[bytes], first: int) -> Iterator[tuple[int, TokenArray]]:
        for start in range(first, len(texts), DOCUMENTS_PER_CALL):
            encoded = self._tokenizer.encode_many(texts[start : start + DOCUMENTS_PER_CALL])
            for index, tokens in enumerate(encoded, start):
                yield index, with_eos(self._tokenizer, tokens)

    def _no_documents(self) -> DataError:
        part, fix = "", ""
        if self._parts > 1:
            part = f"part {self._part + 1} of {self._parts} (one for each worker of each rank) "
            fix = "lower data.workers or the number of ranks, or "
        return DataError(
            f"data.source = {self._name!r}: {part}holds no document to train on; {fix}write "
            "shards with `nsa data prepare`, or take a larger source"
        )


def collect_tokens(
    config: DataConfig,
    tokens: int,
    on_document: OnDocument = lambda source, location: None,
    *,
    split: str = "val",
) -> Iterator[TokenStore]:
    """Read the first documents of a split of each source, until they have `tokens` tokens.

    The whole source is read in order, so the result does not depend on the number of ranks.
    """
    tokenizer = build_tokenizer(config)
    for name in config.sources():
        pieces: list[TokenArray] = []
        text_bytes = count = 0
        on_document(name, NO_DOCUMENT)
        for document in open_source(config, name).read():
            on_document(name, document.location)
            if not in_split(document.text, config.held_out, split):
                continue
            pieces.append(with_eos(tokenizer, tokenizer.encode(document.text)))
            text_bytes, count = text_bytes + len(document.text), count + len(pieces[-1])
            if count >= tokens:
                break
        if not pieces:
            raise no_documents(config, name, split)
        yield TokenStore(
            pieces,
            tokenizer.eos_id,
            text_bytes / count,
            name=f"{name}, held out" if split == "val" else name,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.name,
            tokenizer_fingerprint=tokenizer.fingerprint,
        )
