"""The three branches and their gates as one custom op, forward and backward.

The backward pass never stores a branch's part of the output's gradient. With p a branch's softmax,
g its gate and e = Σ do · o the row sums that are the gate's gradient anyway, the branch's scores
get the gradient (g·p) · (dp - e) and its values (g·p) · do. Since g·p = exp(s - (lse - ln g)), its
backward kernels compute that unchanged, given lse - ln g for lse and e for the row sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import SelectionInputs
from nsa.ops.triton.band_op import Band, band_forward, band_gradients
from nsa.ops.triton.common import binary_lse, kernel
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2
from nsa.ops.triton.select import select_forward
from nsa.ops.triton.selected_op import Selected, selected_forward, selected_gradients
from nsa.spec import NSASpec

ELEMENTS = 4096  # of one output that a program reads


@triton.jit
def _gated(o, gates, row, at, valid, inside, BRANCH: tl.constexpr):
    """One branch's gate times its output [ROWS, PADDED], float32."""
    gate = tl.load(gates + row * 3 + BRANCH, mask=valid, other=0.0).to(tl.float32)
    return gate[:, None] * tl.load(o + at, mask=inside, other=0.0).to(tl.float32)


@kernel
def mix_kernel(
    o_cmp, o_sel, o_win, gates, out, rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Σ gates · outputs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    valid = row < rows
    inside = valid[:, None] & (d < SIZE)[None, :]
    at = (row * SIZE)[:, None] + d[None, :]  # [ROWS, PADDED]
    total = _gated(o_cmp, gates, row, at, valid, inside, 0)
    total += _gated(o_sel, gates, row, at, valid, inside, 1)
    total += _gated(o_win, gates, row, at, valid, inside, 2)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _branch_rows(
    do, o, gates, lse, dgates, sums, lse2, row, at, valid, inside, rows, BRANCH: tl.constexpr
):  # fmt: skip
    total = tl.sum(tl.load(o + at, mask=inside, other=0.0).to(tl.float32) * do, 1)
    gate = tl.load(gates + row * 3 + BRANCH, mask=valid, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + row, mask=valid, other=float("-inf"))
    # A closed gate gives +inf and so p = 0, as for a row that saw nothing.
    closed = gate == 0.0
    shifted = binary_lse(row_lse) - tl.log2(tl.where(closed, 1.0, gate))
    shifted = tl.where(closed, float("inf"), shifted)
    tl.store(dgates + row * 3 + BRANCH, total.to(dgates.dtype.element_ty), mask=valid)
    tl.store(sums + BRANCH * rows + row, total, mask=valid)
    tl.store(lse2 + BRANCH * rows + row, shifted, mask=valid)


@kernel
def gate_rows_kernel(
    do, o_cmp, o_sel, o_win, gates, lse_cmp, lse_sel, lse_win, dgates, sums, lse2, rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Σ do · o of each branch: the gates' gradients and row sums; and lse - ln gate in base 2."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    valid = row < rows
    inside = valid[:, None] & (d < SIZE)[None, :]
    at = (row * SIZE)[:, None] + d[None, :]  # [ROWS, PADDED]
    x = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
    _branch_rows(x, o_cmp, gates, lse_cmp, dgates, sums, lse2, row, at, valid, inside, rows, 0)
    _branch_rows(x, o_sel, gates, lse_sel, dgates, sums, lse2, row, at, valid, inside, rows, 1)
    _branch_rows(x, o_win, gates, lse_win, dgates, sums, lse2, row, at, valid, inside, rows, 2)


def _launch_by_row(kernel: triton.JITFunction, tensors: dict[str, Tensor], like: Tensor) -> None:
    size = like.shape[-1]
    padded, rows = next_power_of_2(size), like.numel() // size
    step = max(1, ELEMENTS // padded)
    constants = {"SIZE": size, "PADDED": padded, "ROWS": step}
    grid = (cdiv(rows, step),)
    launch(kernel, grid, tensors | {"rows": rows}, constants, Config(step, 0, 4, 1))


class Gated(NamedTuple):
    """Inputs of the op."""

    q: Tensor  # [B, T, Hq, Dk]
    k_cmp: Tensor  # [B, N, Hkv, Dk]
    v_cmp: Tensor  # [B, N, Hkv, Dv]
    k_sel: Tensor  # [B, T, Hkv, Dk]
    v_sel: Tensor  # [B, T, Hkv, Dv]
    k_win: Tensor  # [B, T, Hkv, Dk]
    v_win: Tensor  # [B, T, Hkv, Dv]
    gates: Tensor  # [B, T, Hq, 3], 0 or more
    cu_seqlens: Tensor | None
    spec: NSASpec
    scale: float

    def compressed(self) -> Band:
        """The compressed branch alone."""
        band = [self.spec.block_len, self.spec.block_stride, 0]
        return Band(self.q, self.k_cmp, self.v_cmp, self.cu_seqlens, band, self.scale)

    def selection(self, lse: Tensor) -> SelectionInputs:
        """Block selection from the compressed branch's lse."""
        rest = self.cu_seqlens, self.spec, self.q.shape[1], self.scale
        return SelectionInputs(self.q, self.k_cmp, lse, *rest)

    def selected(self, block_index: Tensor) -> Selected:
        """The selected branch alone."""
        rest = block_index, self.cu_seqlens, self.spec, self.scale
        return Selected(self.q, self.k_sel, self.v_sel, *rest)

    def window(self) -> Band:
        """The window branch alone."""
        band = [1, 1, self.spec.window]
        return Band(self.q, self.k_win, self.v_win, self.cu_seqlens, band, self.scale)


def gated_forward(x: Gated) -> tuple[Tensor, ...]:
    """(o, block_index, then o and lse of the compressed, selected and window branch)."""
    o_cmp, lse_cmp = band_forward(x.compressed())
    index = select_forward(x.selection(lse_cmp))
    o_sel, lse_sel = selected_forward(x.selected(index))
    o_win, lse_win = band_forward(x.window())
    o = torch.empty_like(o_cmp)
    tensors = {"o_cmp": o_cmp, "o_sel": o_sel, "o_win": o_win}
    _launch_by_row(mix_kernel, tensors | {"gates": x.gates.contiguous(), "out": o}, o)
    return o, index, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def gated_backward(
    do: Tensor, x: Gated, index: Tensor, *outputs_and_lses: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of q, of the three pairs of keys and values, and of the gates."""
    do = do.contiguous()
    dgates, all_sums, all_lse2 = gate_rows(do, x.gates.contiguous(), outputs_and_lses)
    sums, lse2 = all_sums.unbind(), all_lse2.unbind()  # by branch
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    dk_win, dv_win = band_gradients(do, x.window(), lse2[2], sums[2], dq)
    dk_cmp, dv_cmp = band_gradients(do, x.compressed(), lse2[0], sums[0], dq, add=True)
    dk_sel, dv_sel = selected_gradients(do, x.selected(index), lse2[1], sums[1], dq, add=True)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def gate_rows(
    do: Tensor, gates: Tensor, outputs_and_lses: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dgates, Σ do·o, lse - ln gate in base 2), the latter two [3, B, T, H] in float32."""
    names = "o_cmp", "lse_cmp", "o_sel", "lse_sel", "o_win", "lse_win"
    dgates = torch.empty_like(gates)
    sums, lse2 = (do.new_empty(3, *do.shape[:3], dtype=torch.float32) for _ in range(2))
    tensors = dict(zip(names, outputs_and_lses, strict=True))
    tensors |= {"do": do, "gates": gates, "dgates": dgates, "sums": sums, "lse2": lse2}
    _launch_by_row(gate_rows_kernel, tensors, do)
    return dgates, sums, lse2


def _fake(x: Gated) -> tuple[Tensor, ...]:
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    index, o = x.selection(lse).empty_index(), x.q.new_empty(*x.q.shape[:3], x.v_cmp.shape[-1])
    branches = (torch.empty_like(y) for _ in range(3) for y in (o, lse))
    return o, index, *branches


triton_gated = register(
    "nsa::triton_gated",
    Gated,
    gated_forward,
    _fake,
    outputs=8,
    gradient=Gradient(gated_backward, inputs=8, outputs=1, saved=slice(1, None)),
)
