"""Rows of tokens from documents that are read as they come, and not kept.

    a share of the source  ->  blocks of documents, each shuffled  ->  | document | eos | ...
                                                                       |--- row ---|
                                                                                   |--- row ---|

A place in a stream is where its next row begins: the block, where the source stood before it, and
how much of it was given. Whoever goes on from there reads that block again, and keeps no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from nsa.data.config import DataConfig
from nsa.data.factory import open_source
from nsa.data.order import Mixer, key, shuffled
from nsa.data.source import (
    DataError,
    Reader,
    State,
    held_out,
    in_split,
    no_documents,
)
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray, Tokenizer, build_tokenizer, with_eos

Saw = Callable[[str, str], None]  # told which source is read, and the place of its newest document
NOTHING_YET = "none yet"
TOKENISED_AT_ONCE = 64  # documents: enough to keep a tokenizer's threads busy


def stream_rows(
    config: DataConfig,
    *,
    seed: int,
    part: int,
    parts: int,
    rows: int,
    state: State | None = None,
    saw: Saw,
) -> Iterator[tuple[TokenArray, State]]:
    """What one worker gives without end: rows, and the place behind them."""
    stream = PackedStream(
        config, seed=seed, part=part, parts=parts, rows=rows, state=state, saw=saw
    )
    while True:
        yield next(stream), stream.state()


class PackedStream(Iterator[TokenArray]):
    """Rows [rows, T + 1] from one of `parts` shares of `data.source`, without end.

    Each row is T tokens further on in its source's stream, so it begins with the token that the
    row before it ended with. A mixture gives each source its share of the rows.
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
        saw: Saw = lambda source, place: None,
    ) -> None:
        shares = config.parts()
        places = state["sources"] if state else {}
        self._seq_len, self._rows = config.seq_len, rows
        self._given = state["rows"] if state else 0
        # Every part deals its rows out alike: turns taken between parts could fall in step with
        # the weights, and a part would never read one of its sources.
        self._mixer = Mixer(list(shares.values()), list(shares))
        tokenizer = build_tokenizer(config)
        self._streams = {
            name: _SourceStream(
                config,
                name,
                tokenizer,
                seed=seed,
                part=part,
                parts=parts,
                place=places.get(name),
                saw=saw,
            )
            for name in shares
        }
        self._in_order = list(self._streams.values())

    def __next__(self) -> TokenArray:
        return np.stack([self._row() for _ in range(self._rows)])

    def _row(self) -> TokenArray:
        source, _ = self._mixer.locate(self._given)
        self._given += 1
        return self._in_order[source].row(self._seq_len)

    def state(self) -> State:
        """Where the next row begins, for another stream of the same part to go on from."""
        places = {name: stream.place() for name, stream in self._streams.items()}
        return {"rows": self._given, "sources": places}


class _SourceStream:
    """The endless stream of tokens that a share of one source gives, in windows."""

    def __init__(
        self,
        config: DataConfig,
        name: str,
        tokenizer: Tokenizer,
        *,
        seed: int,
        part: int,
        parts: int,
        place: State | None,
        saw: Saw,
    ) -> None:
        self._config, self._name, self._tokenizer = config, name, tokenizer
        self._seed, self._part, self._parts, self._saw = seed, part, parts, saw
        self._source = open_source(config, name).part(part, parts)
        self._newest = NOTHING_YET
        self._begin = place or {"pass": 0, "block": 0, "reader": None, "document": 0, "token": 0}
        self._ahead: deque[tuple[State, TokenArray]] = deque()  # documents, less what was given
        self._count = 0  # tokens in them
        self._documents = self._tokenised()

    def row(self, length: int) -> TokenArray:
        """The next `length` tokens, and the one behind them, with which the next row begins."""
        while self._count <= length:
            place, tokens = next(self._documents)
            self._ahead.append((place, tokens))
            self._count += len(tokens)
        found, missing = [], length + 1
        for _, tokens in self._ahead:
            found.append(tokens[:missing])
            missing -= len(found[-1])
            if not missing:
                break
        self._drop(length)
        return np.concatenate(found)

    def _drop(self, count: int) -> None:
        self._count -= count
        while count >= len(self._ahead[0][1]):
            count -= len(self._ahead.popleft()[1])
        place, tokens = self._ahead[0]
        self._ahead[0] = {**place, "token": place["token"] + count}, tokens[count:]

    def place(self) -> State:
        """Where the next row begins."""
        return self._ahead[0][0] if self._ahead else self._begin

    def _tokenised(self) -> Iterator[tuple[State, TokenArray]]:
        """Each document's tokens with its eos, and its place, from where the stream begins."""
        number, block, before = (self._begin[name] for name in ("pass", "block", "reader"))
        document, token = self._begin["document"], self._begin["token"]
        while True:
            reader = self._source.read(before)
            while texts := self._block(reader):
                place = {"pass": number, "block": block, "reader": before}
                for at, tokens in self._encode(self._shuffle(texts, number, block), document):
                    yield {**place, "document": at, "token": token}, tokens[token:]
                    token = 0
                document, block, before = 0, block + 1, reader.state()
            if block == 0:
                raise self._empty()
            number, block, before = number + 1, 0, None

    def _block(self, reader: Reader) -> list[bytes]:
        """The next documents that are not for validation; fewer of them at the end of a pass."""
        texts: list[bytes] = []
        self._saw(self._name, self._newest)
        while len(texts) < self._config.shuffle_documents:
            document = next(reader, None)
            if document is None:
                break
            self._newest = document.place
            self._saw(self._name, document.place)
            if not held_out(document.text, self._config.held_out):
                texts.append(document.text)
        return texts

    def _shuffle(self, texts: list[bytes], number: int, block: int) -> list[bytes]:
        """Another order in each block of each pass."""
        shuffle_key = key(self._seed, "documents", self._part, number, block)
        return [texts[shuffled(at, len(texts), shuffle_key)] for at in range(len(texts))]

    def _encode(self, texts: list[bytes], first: int) -> Iterator[tuple[int, TokenArray]]:
        for start in range(first, len(texts), TOKENISED_AT_ONCE):
            encoded = self._tokenizer.encode_many(texts[start : start + TOKENISED_AT_ONCE])
            for at, tokens in enumerate(encoded, start):
                yield at, with_eos(self._tokenizer, tokens)

    def _empty(self) -> DataError:
        share, fix = "", ""
        if self._parts > 1:
            share = f"share {self._part + 1} of {self._parts} (one for each worker of each rank) "
            fix = "lower data.workers or the number of ranks, or "
        return DataError(
            f"data.source = {self._name!r}: {share}holds no document to train on; {fix}write "
            "shards with `nsa data prepare`, or take a larger source"
        )


def collect(
    config: DataConfig,
    tokens: int,
    saw: Saw = lambda source, place: None,
    *,
    split: str = "val",
) -> Iterator[TokenStore]:
    """The first documents of a split of each source, `tokens` tokens of it or a little more.

    They are looked for in the whole source: however many share it, they are the same.
    """
    tokenizer = build_tokenizer(config)
    for name in config.parts():
        pieces: list[TokenArray] = []
        text_bytes = count = 0
        for text in _texts(config, name, split, saw):
            pieces.append(with_eos(tokenizer, tokenizer.encode(text)))
            text_bytes, count = text_bytes + len(text), count + len(pieces[-1])
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
            tokenizer=tokenizer.fingerprint,
        )


def _texts(config: DataConfig, name: str, split: str, saw: Saw) -> Iterator[bytes]:
    saw(name, NOTHING_YET)
    for document in open_source(config, name).read():
        saw(name, document.place)
        if in_split(document.text, config.held_out, split):
            yield document.text
