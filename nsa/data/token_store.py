"""Tokens that are all there, to be read from anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from nsa.data.config import DataConfig
from nsa.data.source import ALL, IN_MEMORY, SPLITS, in_split, no_documents, open_source
from nsa.data.tokenizer import TokenArray, build_tokenizer, with_eos


class TokenStore:
    """One split as a single stream of tokens, in which `eos_id` ends every document.

    The stream may lie in pieces, one behind the other.
    """

    def __init__(
        self,
        pieces: Sequence[TokenArray],
        eos_id: int,
        bytes_per_token: float,
        *,
        name: str = "tokens",
        fingerprint: str = "",
        vocab_size: int = 0,
        tokenizer: str = "",
        tokenizer_name: str = "",
    ) -> None:
        self.eos_id = eos_id
        self.bytes_per_token = bytes_per_token  # of text, to turn loss into bits per byte
        self.name = name
        self.fingerprint = fingerprint  # of the tokens: another one is another text
        self.vocab_size = vocab_size  # no token's number reaches it
        self.tokenizer = tokenizer  # the fingerprint of the one that made the tokens
        self.tokenizer_name = tokenizer_name
        self._pieces = list(pieces)
        self._ends = np.array(list(accumulate(map(len, self._pieces))), dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> TokenArray:
        """Tokens start to stop, both within the stream."""
        assert 0 <= start < stop <= len(self)
        at = int(np.searchsorted(self._ends, start, side="right"))
        found = []
        while start < stop:
            end = int(self._ends[at])
            offset = end - len(self._pieces[at])
            found.append(self._piece(at)[start - offset : min(stop, end) - offset])
            start, at = min(stop, end), at + 1
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _piece(self, number: int) -> TokenArray:
        return self._pieces[number]


def open_store(config: DataConfig, name: str, split: str) -> TokenStore | None:
    """The tokens of one source and split where they can be had whole; None: they are streamed."""
    if split not in (*SPLITS, ALL):
        raise ValueError(f"split = {split!r}: choose one of {', '.join((*SPLITS, ALL))}")
    if name in IN_MEMORY:
        return _tokenise(config, name, split)
    from nsa.data.shards import is_prepared, open_shards

    return open_shards(name, split) if is_prepared(name) else None


def _tokenise(config: DataConfig, name: str, split: str) -> TokenStore:
    tokenizer = build_tokenizer(config)
    pieces: list[TokenArray] = []
    text_bytes = 0
    for document in open_source(config, name).read():
        if in_split(document.text, config.held_out, split):
            text_bytes += len(document.text)
            pieces.append(with_eos(tokenizer, tokenizer.encode(document.text)))
    if not pieces:
        raise no_documents(config, name, split)
    tokens = np.concatenate(pieces)
    digest = hashlib.sha256(tokens.astype(np.uint32).tobytes())
    return TokenStore(
        [tokens],
        tokenizer.eos_id,
        text_bytes / len(tokens),
        name=name,
        fingerprint=digest.hexdigest(),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        tokenizer_name=tokenizer.name,
    )
