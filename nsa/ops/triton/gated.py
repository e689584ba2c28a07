"""The three branches and their gates as one custom op, forward and backward.

Forward: one kernel computes the compressed branch and the window, which read the same queries; the
selected branch's kernel also adds up the gated branches.

Backward: no branch's gradient g · do is stored. With a branch's softmax p, gate g and row sums
delta = Σ do · o, which are also the gate's gradient, its scores get the gradient (g·p) · (dp -
delta) and its values (g·p) · do. Since g·p = exp(s - (lse - ln g)), the same kernels as without
gates compute this, given lse - ln g instead of lse. One kernel computes lse - ln g and delta of all
branches, and dq of the compressed branch and the window; so queries and do are read once and dq is
written once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import GatedInputs
from nsa.ops.triton.band import (
    band_forward,
    is_faster,
    launch_forward,
    launch_keys,
    launch_queries,
    outputs_like,
)
from nsa.ops.triton.configs import one_tile
from nsa.ops.triton.select import select_forward
from nsa.ops.triton.selected import selected_forward, selected_gradients


def _one_tile(x: GatedInputs) -> tuple[int, int] | None:
    """(rows, keys) of a tile with all compressed keys: their backward pass needs no o_cmp."""
    if x.cu_seqlens is not None:  # looking up documents as well takes too many registers
        return None
    head = max(x.q.shape[-1], x.v_cmp.shape[-1])
    return one_tile(x.k_cmp.shape[1], head, x.q.dtype.itemsize)


def gated_forward(x: GatedInputs) -> tuple[Tensor, ...]:
    """(o, block_index, then o and lse of the compressed, selected and window branch)."""
    win, cmp = x.branch("window", x.k_win, x.v_win), x.branch("compressed", x.k_cmp, x.v_cmp)
    if is_faster(x.q, x.v_win):
        o_win, lse_win, o_cmp, lse_cmp = *band_forward(win), *band_forward(cmp)
    else:
        o_win, lse_win, o_cmp, lse_cmp = launch_forward(win, cmp)
    index = select_forward(x.selection(lse_cmp))
    o = torch.empty_like(o_cmp)
    selected = x.branch("selected", x.k_sel, x.v_sel, index)
    o_sel, lse_sel = selected_forward(
        selected, o_cmp=o_cmp, o_win=o_win, gates=x.gates.contiguous(), gated_sum=o
    )
    o_cmp = o_cmp.new_empty(0) if _one_tile(x) else o_cmp
    return o, index, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def gated_backward(
    do: Tensor, x: GatedInputs, index: Tensor,
    o_cmp: Tensor, lse_cmp: Tensor, o_sel: Tensor, lse_sel: Tensor, o_win: Tensor, lse_win: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, of the three pairs of keys and values, and of the gates."""
    do, gates, tile = do.contiguous(), x.gates.contiguous(), _one_tile(x)
    win, cmp = x.branch("window", x.k_win, x.v_win), x.branch("compressed", x.k_cmp, x.v_cmp)
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    dgates = torch.empty_like(gates)
    # [3, B, T, Hq], by branch: Σ do·o, and (lse - ln gate) / ln 2.
    delta, lse2 = (do.new_empty(3, *x.q.shape[:3], dtype=torch.float32) for _ in range(2))
    # The selected branch adds to dq later, and so does the compressed branch if it has one tile.
    launch_queries(
        win, None if tile else cmp, do=do, delta=delta, lse2=lse2, dq=dq,
        gates=gates, dgates=dgates, o_cmp=o_cmp, lse_cmp=lse_cmp,
        o_sel=o_sel, lse_sel=lse_sel, o_win=o_win, lse_win=lse_win,
    )  # fmt: skip
    if tile:
        dk_win, dv_win, dk_cmp, dv_cmp = launch_keys(
            win, cmp, do=do, lse2_win=lse2[2], delta_win=delta[2],
            one_tile=tile, lse_cmp=lse_cmp, gates=gates, dgates=dgates, dq=dq,
        )  # fmt: skip
    else:
        dk_win, dv_win, dk_cmp, dv_cmp = launch_keys(
            win, cmp, do=do, lse2_win=lse2[2], delta_win=delta[2],
            lse2_cmp=lse2[0], delta_cmp=delta[0],
        )  # fmt: skip
    selected = x.branch("selected", x.k_sel, x.v_sel, index)
    dk_sel, dv_sel = selected_gradients(do, selected, lse2[1], delta[1], dq, add=True)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def _fake(x: GatedInputs) -> tuple[Tensor, ...]:
    (o, lse), *others = (outputs_like(x.branch("window", x.k_win, x.v_win)) for _ in range(4))
    index = x.selection(lse).empty_index()
    (o_cmp, lse_cmp), selected, window = others
    o_cmp = o.new_empty(0) if _one_tile(x) else o_cmp
    return o, index, o_cmp, lse_cmp, *selected, *window


triton_gated = register(
    "nsa::triton_gated",
    GatedInputs,
    gated_forward,
    _fake,
    outputs=8,
    gradient=Gradient(gated_backward, inputs=8, outputs=1, saved=slice(1, None)),
)
