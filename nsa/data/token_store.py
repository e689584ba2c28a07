"""Token store: one split of one source as a random-access stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from nsa.data.tokenizer import TokenArray


class TokenStore:
    """Tokens in consecutive pieces; `eos_id` ends every document."""

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
        self.bytes_per_token = bytes_per_token  # converts loss to bits per byte of text
        self.name = name
        self.fingerprint = fingerprint  # of the tokens
        self.vocab_size = vocab_size  # above every token id
        self.tokenizer = tokenizer  # its fingerprint
        self.tokenizer_name = tokenizer_name
        self._pieces = list(pieces)
        self._ends = np.array(list(accumulate(map(len, self._pieces))), dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens [start, stop)."""
        assert 0 <= start < stop <= len(self)
        number = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while start < stop:
            end = int(self._ends[number])
            offset = end - len(self._pieces[number])
            parts.append(self._piece(number)[start - offset : min(stop, end) - offset])
            start, number = min(stop, end), number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _piece(self, number: int) -> TokenArray:
        return self._pieces[number]
