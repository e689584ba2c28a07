"""Factory for `data.source`: `open_source` for documents, `open_store` for tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nsa.data.builtin import embedded, synthetic
from nsa.data.config import DataConfig
from nsa.data.files import open_files
from nsa.data.shards import is_prepared, open_shards
from nsa.data.source import IN_MEMORY, Source, in_split, no_documents
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray, build_tokenizer, with_eos


def open_source(config: DataConfig, name: str) -> Source:
    """Open the documents of `data.source`, or of one source of a mixture."""
    if name == "embedded":
        return embedded()
    if name == "synthetic":
        return synthetic(config.synthetic_bytes)
    if name == "fineweb_edu" or name.startswith("hf:"):
        from nsa.data.hub import open_hub

        return open_hub(config, name)
    return open_files(Path(name).expanduser(), config.text_field)


def open_store(config: DataConfig, name: str, split: str) -> TokenStore | None:
    """Open one split of one source as a token store; None for a source that is streamed."""
    if name in IN_MEMORY:
        return tokenise(config, name, split)
    return open_shards(name, split) if is_prepared(name) else None


def tokenise(
    config: DataConfig,
    name: str,
    split: str,
    tokens: float = math.inf,
    on_document: Callable[[str, str], None] = lambda name, location: None,
) -> TokenStore:
    """Tokenise the first documents of one split of a source, until they have `tokens` tokens."""
    tokenizer = build_tokenizer(config)
    pieces: list[TokenArray] = []
    text_bytes = count = 0
    for document in open_source(config, name).read():
        on_document(name, document.location)
        if in_split(document.text, config.held_out, split):
            pieces.append(with_eos(tokenizer, tokenizer.encode(document.text)))
            text_bytes, count = text_bytes + len(document.text), count + len(pieces[-1])
            if count >= tokens:
                break
    if not pieces:
        raise no_documents(config, name, split)
    joined = np.concatenate(pieces)
    return TokenStore(
        [joined],
        tokenizer.eos_id,
        text_bytes / count,
        name=name,
        fingerprint=hashlib.sha256(joined.astype(np.uint32).tobytes()).hexdigest(),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )
