"""Text to batches: source, tokenizer, order or stream, and the feed that a rank takes from.

Only what is light is imported here: a worker that reads and tokenises starts without PyTorch.
"""

from __future__ import annotations

from nsa.data.config import DataConfig
from nsa.data.source import DataError

__all__ = ["DataConfig", "DataError"]
