"""Tokens that are all there, to be read from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from nsa.data.tokenizer import TokenArray


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
