"""Padded and packed batches of the Hugging Face model: they become one row of documents.

Padding is never computed, and a token sees its own document only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.config import ModelConfig
from nsa.ops.checks import check_documents

Packed = tuple[Tensor, Tensor | None, AttentionMetadata]


@torch.compiler.disable  # sizes depend on the mask: one graph break instead of one per operation
def pack(
    config: ModelConfig,
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    loss_offset: Tensor | None = None,
) -> Packed:
    """Return the tokens to compute, a mask for `unpack`, and their attention metadata.

    `tokens` are ids [B, T] or embeddings [B, T, width]; a batch with padding or several documents
    in a row becomes [1, tokens]. The mask is [B, T], true for tokens and false for padding, or None
    if nothing was packed. Documents start where `position_ids` restart at 0; if they never do, or
    without them, at `cu_seqlens`. `loss_offset` is `AttentionMetadata.build`'s.
    """
    real = real_tokens(attention_mask, tokens)
    starts = document_starts(position_ids, tokens, real)
    if real is not None and starts is None and cu_seqlens is not None:
        raise ValueError(
            "cu_seq_lens_q: not with padding in attention_mask; pass position_ids that restart at "
            "0 with each document"
        )
    if real is None and starts is not None:
        real = torch.ones_like(starts)
    if real is not None:
        starts = _first_tokens(real) if starts is None else _first_tokens(real) | starts
        tokens = tokens[real][None]
        offsets = starts[real].nonzero()[:, 0]
        cu_seqlens = F.pad(offsets, (0, 1), value=tokens.shape[1]).int()
    check_documents(cu_seqlens, tokens, "input_ids")
    metadata = AttentionMetadata.build(
        config, tokens.shape[1], cu_seqlens, tokens.device, loss_offset=loss_offset
    )
    return tokens, real, metadata


def unpack(packed: Tensor, real: Tensor | None) -> Tensor:
    """Return packed states [1, tokens, width] as [B, T, width], with 0 for padding."""
    if real is None:
        return packed
    padded = packed.new_zeros(*real.shape, packed.shape[-1])
    return padded.masked_scatter(real[..., None], packed)


def real_tokens(mask: Tensor | None, tokens: Tensor, cached: int | None = None) -> Tensor | None:
    """Return [B, T], true for tokens and false for padding; None if there is no padding.

    `cached`: columns in the cache, None without a cache; `mask` covers them and the new ones.
    """
    if mask is None:
        return None
    rows, columns = tokens.shape[:2]
    shape = (rows, columns + (cached or 0))
    if mask.shape != shape:
        extra = "" if cached is None else ", including the columns in the cache"
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; it must be {shape}{extra}")
    real = mask[:, -columns:] != 0
    if real.all():
        return None
    if cached:
        raise ValueError("attention_mask: with a filled cache every sequence needs new tokens")
    if cached is not None or not real.any():
        check_rows(real)
    return real


def check_rows(real: Tensor) -> None:
    """Raise a ValueError if a row of `real` [B, T] has no token."""
    empty = ~real.any(1)
    if empty.any():
        row = int(empty.nonzero()[0])
        raise ValueError(f"attention_mask: row {row} has no token to continue; give it a bos")


def document_starts(
    position_ids: Tensor | None, tokens: Tensor, real: Tensor | None, cached: int | None = None
) -> Tensor | None:
    """Return [B, T], true at the second and later documents of a row; None if there are none."""
    if position_ids is None:
        return None
    rows, columns = tokens.shape[:2]
    if position_ids.shape[-1] != columns or position_ids.numel() not in (columns, rows * columns):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; it must be {(rows, columns)}"
        )
    if real is None:
        real = torch.ones(rows, columns, dtype=torch.bool, device=tokens.device)
    starts = real & (position_ids.reshape(-1, columns) == 0)
    if not cached:
        starts &= ~_first_tokens(real)
    if not starts.any():
        return None
    if cached is not None:
        row, column = starts.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {column}] = 0 starts a second document; with a cache a sequence "
            "holds one: set use_cache=False, or give each document its own row"
        )
    return starts


def _first_tokens(real: Tensor) -> Tensor:
    """Return [B, T], true at each sequence's first token."""
    return real & (real.cumsum(1) == 1)


def keep_columns(states: Tensor, mask: Tensor | None, keep: int | Tensor) -> Tensor:
    """Return the last `keep` columns (0: all) of states [B, T, width], or those in `keep`.

    For keep = 1, return each sequence's last token, also if right padding follows it.
    """
    if mask is not None and isinstance(keep, int) and keep == 1:
        return last_tokens(states, mask)
    return states[:, slice(-keep, None) if isinstance(keep, int) else keep]


@torch.compiler.disable  # reads the mask
def last_tokens(states: Tensor, mask: Tensor) -> Tensor:
    """Return each sequence's last token, [B, 1, width]."""
    real = mask[:, -states.shape[1] :] != 0
    check_rows(real)
    columns = torch.arange(real.shape[1], device=real.device)
    return states.take_along_dim((columns * real).argmax(1)[:, None, None], 1)
