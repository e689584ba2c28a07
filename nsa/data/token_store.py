"""Token store: one split of one source as a random-access stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nsa.data.tokenizer import TokenArray

MANY_EPOCHS = 4  # further epochs lower the loss little (arXiv 2305.16264)


@dataclass(eq=False)
class TokenStore:
    """Consecutive pieces of tokens; `eos_id` ends every document."""

    pieces: Sequence[TokenArray]
    eos_id: int
    bytes_per_token: float  # converts loss to bits per byte of text
    name: str = "tokens"
    fingerprint: str = ""  # of the tokens
    vocab_size: int = 0  # above every token id
    tokenizer: str = ""  # its name
    tokenizer_fingerprint: str = ""
    notes: Sequence[str] = ()  # for the log
    grows: bool = False  # the source may still be read: samples are shuffled in blocks
    size: int | None = None  # bytes of the source of a store that grows, if they are known

    def __post_init__(self) -> None:
        self._ends = np.cumsum([len(piece) for piece in self.pieces], dtype=np.int64)

    def wait_for(self, tokens: int) -> int:
        """Wait until the store has `tokens` tokens or its source ends; return how many it has."""
        return len(self)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens [start, stop)."""
        assert 0 <= start < stop <= len(self)
        number = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while start < stop:
            end, piece = int(self._ends[number]), self._piece(number)
            offset = end - len(piece)
            parts.append(piece[start - offset : min(stop, end) - offset])
            start, number = min(stop, end), number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _piece(self, number: int) -> TokenArray:
        return self.pieces[number]


def coverage(
    stores: Sequence[TokenStore], fractions: Sequence[float], seq_len: int, samples: int
) -> list[str]:
    """Return a line per store: its size, and how much of it a run of `samples` reads."""
    lines: list[str] = []
    for store, fraction in zip(stores, fractions, strict=True):
        lines += store.notes
        tokenizer = f" (tokenizer {store.tokenizer})" if store.tokenizer else ""
        consumed = round(samples * fraction)
        if store.grows:
            line = f"{store.name}: tokenised as the run reads it{tokenizer}, shuffled in blocks; "
            lines.append(f"{line}the run consumes {consumed:,} samples of {seq_len:,}")
            if store.size:  # a token has one byte or more
                epochs = consumed * seq_len / store.size
                lines += epochs_warning(store.name, f"{store.size:,} bytes", epochs)
            continue
        per_epoch = (len(store) - 1) // seq_len
        left_over = len(store) - per_epoch * seq_len - 1
        line = f"{store.name}: {len(store):,} tokens{tokenizer}, "
        line += f"{per_epoch:,} samples of {seq_len:,}, no padding"
        if left_over > 0:
            line += f", and {left_over:,} tokens left over"
        epochs = consumed / per_epoch
        line += f"; the run consumes {consumed:,}: "
        line += f"{epochs:.2f} epochs" if epochs > 1 else f"{epochs:.1%} of them, once"
        lines.append(line)
        lines += epochs_warning(store.name, f"{len(store):,} tokens", epochs)
    return lines


def epochs_warning(name: str, size: str, epochs: float) -> list[str]:
    """Return a warning if a run reads a dataset for more than MANY_EPOCHS epochs."""
    warning = f"WARNING: {name}: {size}, {epochs:,.0f} epochs: the model will memorize it; take a "
    return [warning + "larger data.source, or lower --steps"] if epochs > MANY_EPOCHS else []
