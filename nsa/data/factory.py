"""Factory for `data.source`: `open_source` for documents, `open_store` for tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from nsa.data.builtin import embedded, synthetic
from nsa.data.config import DataConfig
from nsa.data.files import open_files
from nsa.data.shards import is_prepared, open_shards
from nsa.data.source import IN_MEMORY, Source, in_split, no_documents
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import build_tokenizer, with_eos


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
        return _tokenise(config, name, split)
    return open_shards(name, split) if is_prepared(name) else None


def _tokenise(config: DataConfig, name: str, split: str) -> TokenStore:
    tokenizer = build_tokenizer(config)
    documents = (document.text for document in open_source(config, name).read())
    texts = [text for text in documents if in_split(text, config.held_out, split)]
    if not texts:
        raise no_documents(config, name, split)
    tokens = np.concatenate([with_eos(tokenizer, tokenizer.encode(text)) for text in texts])
    return TokenStore(
        [tokens],
        tokenizer.eos_id,
        sum(map(len, texts)) / len(tokens),
        name=name,
        fingerprint=hashlib.sha256(tokens.astype(np.uint32).tobytes()).hexdigest(),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )
