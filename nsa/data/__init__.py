"""Data pipeline: sources, tokenizers, prepared shards, and resumable loaders.

Imports only what is light: a worker process must start without PyTorch.
"""

from __future__ import annotations

from nsa.data.config import DataConfig
from nsa.data.source import DataError

__all__ = ["DataConfig", "DataError"]
