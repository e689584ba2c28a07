"""Coverage report: samples per source, tokens left over, and how many epochs a run takes."""

from __future__ import annotations

from collections.abc import Sequence

from nsa.data.token_store import TokenStore


def coverage(
    stores: Sequence[TokenStore], fractions: Sequence[float], seq_len: int, samples: int
) -> list[str]:
    """One line per store: what it holds, and how much of it a run of `samples` consumes."""
    lines = []
    for store, fraction in zip(stores, fractions, strict=True):
        per_epoch = max(0, (len(store) - 1) // seq_len)
        left_over = len(store) - per_epoch * seq_len - 1
        consumed = round(samples * fraction)
        line = f"{store.name}: {len(store):,} tokens"
        line += f" (tokenizer {store.tokenizer_name}), " if store.tokenizer_name else ", "
        line += f"{per_epoch:,} samples of {seq_len:,}, no padding"
        if left_over > 0:
            line += f", and {left_over:,} tokens left over"
        if per_epoch:
            epochs = consumed / per_epoch
            line += f"; the run consumes {consumed:,}: "
            line += f"{epochs:.2f} epochs" if epochs > 1 else f"{epochs:.1%} of them, once"
        lines.append(line)
    return lines
