"""The window branch's forward pass by flash-attn, where tuning measured it to be the faster one.

The backward pass stays with band.py's kernels, which read flash-attn's lse: they take gates through
lse and delta, and flash-attn's backward pass would compute its own delta.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from nsa.ops.triton.configs import choose
from nsa.ops.triton.launch import padded_size

OPERATION = "window_library"  # what `nsa doctor --tune` measures and stores
OURS, FLASH = "ours", "flash-attn"
HEAD_MULTIPLE = 8


def is_faster(q: Tensor, v: Tensor) -> bool:
    """Whether flash-attn supports these tensors and was the faster one on this GPU."""
    supported = (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % HEAD_MULTIPLE == 0
        and _installed()
    )
    if not supported:
        return False
    sizes = padded_size(q.shape[-1]), padded_size(v.shape[-1])
    return choose(OPERATION, [OURS, FLASH], sizes, q.dtype, q.shape[1]) == FLASH


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("flash_attn") is not None


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (o, lse) as `band_forward` does.

    flash-attn's `window_size` counts the keys to the left and right of the query, without its own.
    """
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    options = {
        "softmax_scale": scale,
        "causal": True,
        "window_size": (window - 1, 0),
        "return_attn_probs": True,  # returns lse; the probabilities themselves are left out
    }
    if cu_seqlens is None:
        o, lse, _ = flash_attn_func(q, k, v, **options)
        return o.contiguous(), lse.transpose(1, 2).contiguous()
    # An upper bound of the longest document; the exact length would be a host sync.
    cu, longest = cu_seqlens.int(), q.shape[1]
    o, lse, _ = flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, longest, longest, **options)
    return o[None].contiguous(), lse.t()[None].contiguous()
