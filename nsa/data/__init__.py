"""Text to batches: a source, a tokenizer, and batches that are a pure function of the step."""

from __future__ import annotations

from nsa.data.batches import Batch, Batches, build_batches
from nsa.data.config import DataConfig
from nsa.data.source import TokenStore, embedded_files, open_split
from nsa.data.tokenizer import ByteTokenizer, build_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "ByteTokenizer",
    "DataConfig",
    "TokenStore",
    "build_batches",
    "build_tokenizer",
    "embedded_files",
    "open_split",
]
