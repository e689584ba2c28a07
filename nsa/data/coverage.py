"""How far a run gets through its text: nothing is left out, or seen again, unsaid."""

from __future__ import annotations

from collections.abc import Sequence

from nsa.data.token_store import TokenStore


def coverage(
    stores: Sequence[TokenStore], shares: Sequence[float], seq_len: int, samples: int
) -> list[str]:
    """A line for each store: what it holds, and what a run that deals `samples` takes of it."""
    lines = []
    for store, share in zip(stores, shares, strict=True):
        each_epoch = max(0, (len(store) - 1) // seq_len)
        tail = len(store) - each_epoch * seq_len - 1
        consumed = round(samples * share)
        line = f"{store.name}: {len(store):,} tokens"
        line += f" (tokenizer {store.tokenizer_name}), " if store.tokenizer_name else ", "
        line += f"{each_epoch:,} samples of {seq_len:,}, no padding"
        if tail > 0:
            line += f", and {tail:,} tokens that fill none"
        if each_epoch:
            epochs = consumed / each_epoch
            line += f"; the run deals {consumed:,}: "
            line += f"{epochs:.2f} epochs" if epochs > 1 else f"{epochs:.1%} of them, once"
        lines.append(line)
    return lines
