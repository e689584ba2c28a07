"""KV cache of the Hugging Face model: `KVCache` with transformers' interface."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from nsa.model.cache import KVCache


class NSACache(Cache):
    """`KVCache` with transformers' interface; `forward(use_cache=True)` creates and fills it.

    Tokens cannot be removed, because older inputs of compressed blocks are not stored.
    """

    is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kv: KVCache | None = None
        self.columns = 0  # of input_ids so far, including padding

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns of input_ids so far, as generate() expects, including padding."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv is not None:
            self.kv = self.kv.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            rows = torch.arange(self.kv.batch, device=self.kv.device)
            self.kv = self.kv.select(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self.kv, self.columns = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("NSACache: tokens cannot be removed; decode without an assistant")
