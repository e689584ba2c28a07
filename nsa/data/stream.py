"""Streaming token rows: documents are read, shuffled in blocks, tokenised and packed on the fly.

    one part of the source  ->  blocks of documents, each shuffled  ->  | document | eos | ...
                                                                        |--- row ---|
                                                                                    |--- row ---|

A cursor locates the start of the next row: the block, the reader's state before it, and the
documents and tokens of the block that were consumed. Resuming reads that block again, so no text is
saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nsa.data.dataset import NO_DOCUMENT, Dataset, OnDocument, OpenedSource
from nsa.data.order import Mixer, hash64, shuffled_index
from nsa.data.source import DataError, Reader, Skipped, State
from nsa.data.tokenizer import TokenArray, build_tokenizer

Rows = tuple[TokenArray, State, dict[str, Skipped]]  # rows, cursors after them, skipped so far
START: State = {"pass": 0, "block": 0, "reader": None, "document": 0, "token": 0}  # a cursor
SHUFFLE_DOCUMENTS = 1_000  # documents of a block
DOCUMENTS_PER_CALL = 64  # of the tokenizer; enough to keep its threads busy


def stream_rows(
    dataset: Dataset,
    *,
    seed: int,
    part: int,
    parts: int,
    rows: int,
    state: State | None = None,
    on_document: OnDocument = lambda source, location: None,
) -> Iterator[Rows]:
    """Yield batches [rows, T + 1] of part `part` of `parts` of `data.source`, without end.

    Each comes with the state from which a new stream of the same part resumes, and with what was
    skipped of each source. A row begins with the last token of its source's previous row. In a
    mixture, each source fills its fraction of the rows.
    """
    fractions = dataset.config.sources()
    cursors = state["sources"] if state else {}
    consumed = state["rows"] if state else 0
    # Each part mixes its rows separately. If parts took turns in one order, a part could get rows
    # of some sources only: a mixture 1:1 on two parts would give each part one source.
    mixer = Mixer(list(fractions.values()), list(fractions))
    streams = [
        _SourceStream(source, on_document, seed, part, parts, cursors.get(source.name) or START)
        for source in dataset.sources
    ]
    while True:
        sources = [mixer.locate(position)[0] for position in range(consumed, consumed + rows)]
        batch = np.stack([streams[source].row(dataset.config.seq_len) for source in sources])
        consumed += rows
        yield (
            batch,
            {"rows": consumed, "sources": {one.source.name: one.cursor() for one in streams}},
            {one.source.name: one.skipped for one in streams},
        )


@dataclass(eq=False)
class _SourceStream:
    """One part of one source as an endless stream of tokens, cut into rows."""

    source: OpenedSource
    on_document: OnDocument
    seed: int
    part: int
    parts: int
    start: State  # cursor

    def __post_init__(self) -> None:
        self._documents = self.source.documents.part(self.part, self.parts)
        self._tokenizer = build_tokenizer(self.source.config)
        self.skipped = Skipped()  # in the pass that skipped most: passes skip the same
        self._newest = NO_DOCUMENT
        self._pending: deque[tuple[State, TokenArray]] = deque()  # (cursor, tokens) of documents
        self._pending_tokens = 0
        self._encoded = self._encode_from_start()

    def row(self, length: int) -> TokenArray:
        """Return the next `length` tokens and the one after them, which starts the next row."""
        while self._pending_tokens <= length:
            cursor, tokens = next(self._encoded)
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
        """Return the cursor of the next row."""
        return self._pending[0][0] if self._pending else self.start

    def _encode_from_start(self) -> Iterator[tuple[State, TokenArray]]:
        """Yield the cursor and tokens, with eos, of each document from the start cursor on."""
        pass_number, block = self.start["pass"], self.start["block"]
        before = self.start["reader"]  # the reader's state before the block
        document, token = self.start["document"], self.start["token"]
        while True:
            reader = self._documents.read(before)
            while texts := self._block(reader):
                cursor = {"pass": pass_number, "block": block, "reader": before}
                texts = self._shuffle(texts, pass_number, block)
                for index, tokens in self._encode(texts, document):
                    yield {**cursor, "document": index, "token": token}, tokens[token:]
                    token = 0
                document, block, before = 0, block + 1, reader.state()
            if block == 0:
                raise self._no_documents()
            pass_number, block, before = pass_number + 1, 0, None

    def _block(self, reader: Reader) -> list[bytes]:
        """Return SHUFFLE_DOCUMENTS training documents, or fewer at the end of a pass."""
        texts: list[bytes] = []
        self.on_document(self.source.name, self._newest)
        while len(texts) < SHUFFLE_DOCUMENTS:
            document = next(reader, None)
            if document is None:
                break
            self._newest = document.location
            self.on_document(self.source.name, self._newest)
            if text := self.source.division.text_for(document.text, "train"):
                texts.append(text)
        self.skipped = max(self.skipped, reader.skipped)
        return texts

    def _shuffle(self, texts: list[bytes], pass_number: int, block: int) -> list[bytes]:
        """Return the texts in an order that differs between blocks and between passes."""
        size = len(texts)
        shuffle_key = hash64(self.seed, "documents", self.part, pass_number, block)
        return [texts[shuffled_index(index, size, shuffle_key)] for index in range(size)]

    def _encode(self, texts: list[bytes], first: int) -> Iterator[tuple[int, TokenArray]]:
        for start in range(first, len(texts), DOCUMENTS_PER_CALL):
            encoded = self._tokenizer.encode_documents(texts[start : start + DOCUMENTS_PER_CALL])
            yield from enumerate(encoded, start)

    def _no_documents(self) -> DataError:
        part, fix = "", ""
        if self.parts > 1:
            part = f"part {self.part + 1} of {self.parts} (one for each rank) "
            fix = "lower the number of ranks, or "
        text = (
            f"data.source = {self.source.name!r}: {part}holds no document to train on; {fix}write "
            "shards with `nsa data prepare`, or take a larger source"
        )
        return DataError("; ".join([text, *self.skipped.note(self.source.name)]))
