"""Text to token ids and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nsa.data.config import DataConfig

TokenArray = npt.NDArray[np.uint16]


class ByteTokenizer:
    """Every byte is a token, so any text fits and nothing has to be downloaded."""

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259

    def encode(self, text: bytes) -> TokenArray:
        """The ids of `text`, without specials."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """The bytes that `ids` spell; specials, and ids beyond the vocabulary, spell nothing."""
        array = np.asarray(ids, dtype=np.int64)
        return array[(array >= 0) & (array < self.bos_id)].astype(np.uint8).tobytes()


def build_tokenizer(config: DataConfig) -> ByteTokenizer:
    """The tokenizer that `data.tokenizer` names."""
    config.validate()
    return ByteTokenizer()
