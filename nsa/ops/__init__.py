"""Functional Native Sparse Attention; docs/design/nsa.md defines it.

Sizes: q [B, T, Hq, Dk]; keys [B, T or N, Hkv, Dk]; values [..., Dv]; gates [B, T, Hq, 3] in the
order compressed, selected, window, each 0 or more. `scale` defaults to Dk^-0.5. `lse` is float32
(float64 for float64 inputs). `cu_seqlens` int32 [documents + 1] packs documents into a batch of 1;
no query sees another document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops import triton
from nsa.ops.backend import dispatch, fallback_counts, reset_fallback_counts
from nsa.ops.inputs import (
    AttentionInputs,
    GatedInputs,
    PackedLayout,
    SelectionInputs,
    block_starts,
    check_compressed,
    check_documents,
    check_heads,
    check_length,
    check_scale,
    compressed_cu_seqlens,
)
from nsa.ops.per_token import add_rms_norm, swiglu
from nsa.ops.rotary import rotary_pool
from nsa.ops.selector import selector_loss
from nsa.spec import NSASpec

__all__ = [
    "NSASpec",
    "PackedLayout",
    "add_rms_norm",
    "compress_mean",
    "compressed_attention",
    "compressed_cu_seqlens",
    "fallback_counts",
    "nsa_attention",
    "reset_fallback_counts",
    "rotary_pool",
    "select_blocks",
    "selected_attention",
    "selector_loss",
    "swiglu",
    "window_attention",
]


def compress_mean(x: Tensor, spec: NSASpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the mean of each compressed block of keys or values [B, T, H, D]: [B, N, H, D].

    Keys must be rotated already. `rotary_pool` rotates and pools in one pass over a projection.
    """
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [B, T, heads, size]")
    check_documents(cu_seqlens, x, "x")
    if cu_seqlens is None and x.shape[1] >= spec.block_len:
        blocks = x.unfold(1, spec.block_len, spec.block_stride)  # [B, N, H, D, l], a view
    else:
        first = block_starts(x.shape[1], cu_seqlens, spec, x.device)
        tokens = first[:, None] + torch.arange(spec.block_len, device=x.device)  # [N, l]
        blocks = x[:, tokens].movedim(2, -1)
    return blocks.mean(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    spec: NSASpec,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend over the compressed blocks that end at or before each query; return (o, lse).

    A query that sees no block gets o = 0 and lse = -inf.
    """
    check_heads(q, k_cmp=k_cmp, v_cmp=v_cmp)
    check_documents(cu_seqlens, q)
    check_compressed(k_cmp, q.shape[1], spec, cu_seqlens)
    inputs = q, k_cmp, v_cmp, None, cu_seqlens, "compressed", spec, check_scale(q, scale)
    return dispatch(backend, "compressed_attention", q, v_cmp).attention(AttentionInputs(*inputs))


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    spec: NSASpec,
    *,
    seq_len: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the blocks that each query selects, ascending, padded with -1: int32 [B, T, Hkv, n].

    Blocks are ranked by the compressed softmax, summed over the query heads of a KV head. `lse`
    normalizes each head's softmax; with one query head per KV head it may be None, because a
    normalizer does not change the order of a query's blocks. If q holds only a document's last
    positions (decoding), `seq_len` is the document's full length. No gradient flows through the
    selection.
    """
    check_heads(q, k_cmp=k_cmp)
    check_documents(cu_seqlens, q)
    length = q.shape[1] if seq_len is None else seq_len
    if length < q.shape[1] or (cu_seqlens is not None and length != q.shape[1]):
        raise ValueError(
            f"seq_len = {seq_len} does not fit q's {q.shape[1]} positions; give the document's "
            "full length, and leave it out with cu_seqlens"
        )
    check_compressed(k_cmp, length, spec, cu_seqlens)
    if lse is None and q.shape[2] != k_cmp.shape[2]:
        raise ValueError(
            f"lse = None: needs one query head per KV head, and q has {q.shape[2]} for "
            f"{k_cmp.shape[2]}; give the lse of compressed_attention"
        )
    if lse is not None and lse.shape != q.shape[:3]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}; it must be {tuple(q.shape[:3])}")
    detached = q.detach(), k_cmp.detach(), None if lse is None else lse.detach()
    x = SelectionInputs(*detached, cu_seqlens, spec, length, check_scale(q, scale))
    return dispatch(backend, "select_blocks", q).select_blocks(x)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor,
    spec: NSASpec,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend over the positions of each query's selected blocks, up to the query's own."""
    check_heads(q, k=k, v=v)
    check_length("k", k, q.shape[1], "q")
    check_documents(cu_seqlens, q)
    expected = (*q.shape[:2], k.shape[2], spec.select_top)
    if block_index.shape != expected:
        raise ValueError(
            f"block_index has shape {tuple(block_index.shape)}; it must be {expected}: "
            "[B, T, Hkv, select_top]"
        )
    inputs = q, k, v, block_index, cu_seqlens, "selected", spec, check_scale(q, scale)
    return dispatch(backend, "selected_attention", q, v).attention(AttentionInputs(*inputs))[0]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend over the last `window` positions, the query's own included."""
    check_heads(q, k=k, v=v)
    check_length("k", k, q.shape[1], "q")
    check_documents(cu_seqlens, q)
    if window < 1:
        raise ValueError(f"window = {window}: a query sees at least itself; make it 1 or more")
    spec = NSASpec(window=window)  # the window branch reads only this field
    inputs = q, k, v, None, cu_seqlens, "window", spec, check_scale(q, scale)
    return dispatch(backend, "window_attention", q, v).attention(AttentionInputs(*inputs))[0]


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: NSASpec,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the sum of the three branches' outputs, each times its gate: Σ gate_c · o_c.

    Gates must be 0 or more. This is not checked, as a check would synchronise with the device;
    a negative gate makes the kernels' gradients NaN.
    """
    tensors = q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates
    inputs = GatedInputs(*tensors, cu_seqlens, spec, check_scale(q, scale))
    return nsa_attention_and_blocks(inputs, backend)[0]


def nsa_attention_and_blocks(x: GatedInputs, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Return `nsa_attention` and, for telemetry, each query's selected blocks."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, cu_seqlens, spec, scale = x
    if gates.shape != (*q.shape[:3], 3):
        raise ValueError(
            f"gates has shape {tuple(gates.shape)}; it must be {(*q.shape[:3], 3)}: [B, T, Hq, 3]"
        )
    check_heads(q, k_cmp=k_cmp, v_cmp=v_cmp, k_sel=k_sel, v_sel=v_sel, k_win=k_win, v_win=v_win)
    for branch, k, v in (("sel", k_sel, v_sel), ("win", k_win, v_win)):
        if v.shape[2:] != v_cmp.shape[2:]:
            raise ValueError(
                f"v_{branch} has heads and size {tuple(v.shape[2:])} and v_cmp has "
                f"{tuple(v_cmp.shape[2:])}; branches must agree in both"
            )
        check_length(f"k_{branch}", k, q.shape[1], "q")
    if dispatch(backend, "nsa_attention", q, v_cmp) is triton:  # all branches as one op
        check_documents(cu_seqlens, q)
        check_compressed(k_cmp, q.shape[1], spec, cu_seqlens)
        from nsa.ops.triton.band import triton_gated

        o, block_index, *_ = triton_gated(x)
        return o, block_index
    # `auto` fell back and was counted above. Given again, it would count each branch too.
    by_name = "reference" if backend == "reference" else "blockwise"
    options: dict[str, Any] = {"scale": scale, "cu_seqlens": cu_seqlens, "backend": by_name}
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, spec, **options)
    block_index = select_blocks(q, k_cmp, lse, spec, **options)
    o_sel = selected_attention(q, k_sel, v_sel, block_index, spec, **options)
    o_win = window_attention(q, k_win, v_win, spec.window, **options)
    g_cmp, g_sel, g_win = (gate[..., None] for gate in gates.unbind(-1))
    return g_cmp * o_cmp + g_sel * o_sel + g_win * o_win, block_index
