"""The three branches and their gates as one operation, forward and backward.

The backward pass never writes a branch's share of the output's gradient. With p a branch's
softmax, g its gate and e = Σ do · o the row sums that are the gate's gradient anyway, what the
branch passes on is (g·p) · do and (g·p) · (dp - e). Since g·p = exp(s - (lse - ln g)), its own
backward kernels do that as they are, given lse - ln g for lse and e for the row sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.band_op import band_forward, band_gradients
from nsa.ops.triton.common import binary_lse
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import launch
from nsa.ops.triton.select import select_forward
from nsa.ops.triton.selected_op import selected_forward, selected_gradients
from nsa.spec import NSASpec

ELEMENTS = 4096  # of one output that a program takes in
BRANCHES = 3


@triton.jit
def _share(x, gates, row, at, valid, inside, BRANCH: tl.constexpr):
    """One branch's part: its gate times its output, float32."""
    gate = tl.load(gates + row * 3 + BRANCH, mask=valid, other=0.0).to(tl.float32)
    return gate[:, None] * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("rows",))
def mix_kernel(
    a, b, c, gates, out, rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Σ gates · outputs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    valid = row < rows
    inside = valid[:, None] & (d < SIZE)[None, :]
    at = (row * SIZE)[:, None] + d[None, :]
    total = _share(a, gates, row, at, valid, inside, 0)
    total += _share(b, gates, row, at, valid, inside, 1)
    total += _share(c, gates, row, at, valid, inside, 2)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_of_branch(
    do, x, gates, lse, dgates, sums, lse2, row, at, valid, inside, rows, BRANCH: tl.constexpr
):  # fmt: skip
    total = tl.sum(tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * do, 1)
    gate = tl.load(gates + row * 3 + BRANCH, mask=valid, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + row, mask=valid, other=float("-inf"))
    # A closed gate gives +inf and so p = 0, as a row that saw nothing has it.
    closed = gate == 0.0
    shifted = binary_lse(row_lse) - tl.log2(tl.where(closed, 1.0, gate))
    shifted = tl.where(closed, float("inf"), shifted)
    tl.store(dgates + row * 3 + BRANCH, total.to(dgates.dtype.element_ty), mask=valid)
    tl.store(sums + BRANCH * rows + row, total, mask=valid)
    tl.store(lse2 + BRANCH * rows + row, shifted, mask=valid)


@triton.jit(do_not_specialize=("rows",))
def gate_rows_kernel(
    do, a, b, c, gates, lse_a, lse_b, lse_c, dgates, sums, lse2, rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Σ do · o of each branch: the gates' gradients and row sums; and lse - ln gate in base 2."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    valid = row < rows
    inside = valid[:, None] & (d < SIZE)[None, :]
    at = (row * SIZE)[:, None] + d[None, :]
    do_tile = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
    _row_of_branch(do_tile, a, gates, lse_a, dgates, sums, lse2, row, at, valid, inside, rows, 0)
    _row_of_branch(do_tile, b, gates, lse_b, dgates, sums, lse2, row, at, valid, inside, rows, 1)
    _row_of_branch(do_tile, c, gates, lse_c, dgates, sums, lse2, row, at, valid, inside, rows, 2)


def mix(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    """Σ gates_c · o_c over contiguous [B, T, H, D] and gates [B, T, H, 3]."""
    out = torch.empty_like(a)
    _launch(mix_kernel, {"a": a, "b": b, "c": c, "gates": gates.contiguous(), "out": out}, a)
    return out


def gate_rows(
    do: Tensor, outputs: list[Tensor], gates: Tensor, lses: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dgates, Σ do·o, lse - ln gate in base 2), the latter two [3, B, T, H] in float32."""
    dgates = torch.empty_like(gates)
    sums = do.new_empty(BRANCHES, *do.shape[:3], dtype=torch.float32)
    lse2 = torch.empty_like(sums)
    named = dict(zip("abc", outputs, strict=True)) | {
        f"lse_{branch}": lse for branch, lse in zip("abc", lses, strict=True)
    }
    written = {"dgates": dgates, "sums": sums, "lse2": lse2}
    _launch(gate_rows_kernel, {"do": do, "gates": gates} | named | written, do)
    return dgates, sums, lse2


def _launch(kernel: Any, tensors: dict[str, Tensor], like: Tensor) -> None:
    size = like.shape[-1]
    padded = triton.next_power_of_2(size)
    rows, step = like.numel() // size, max(1, ELEMENTS // padded)
    launch(
        kernel,
        (triton.cdiv(rows, step),),
        tensors | {"rows": rows},
        {"SIZE": size, "PADDED": padded, "ROWS": step},
        Config(step, 0, 4, 1),
    )


def gated_forward(
    q: Tensor,
    keys_values: list[Tensor],
    gates: Tensor,
    cu_seqlens: Tensor | None,
    spec: NSASpec,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o, block_index, then o and lse of the compressed, selected and window branch)."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = keys_values
    o_cmp, lse_cmp = band_forward(q, k_cmp, v_cmp, cu_seqlens, _compressed(spec), scale)
    index = select_forward(q, k_cmp, lse_cmp, cu_seqlens, spec, q.shape[1], scale)
    o_sel, lse_sel = selected_forward(q, k_sel, v_sel, index, cu_seqlens, spec, scale)
    o_win, lse_win = band_forward(q, k_win, v_win, cu_seqlens, _window(spec), scale)
    o = mix(o_cmp, o_sel, o_win, gates)
    return o, index, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def gated_backward(
    do: Tensor,
    q: Tensor,
    keys_values: list[Tensor],
    gates: Tensor,
    index: Tensor,
    outputs: list[Tensor],
    lses: list[Tensor],
    cu_seqlens: Tensor | None,
    spec: NSASpec,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, of the three pairs of keys and values, and of the gates."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = keys_values
    do = do.contiguous()
    dgates, sums, lse2 = gate_rows(do, outputs, gates.contiguous(), lses)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    rest = cu_seqlens, scale
    dk_win, dv_win = band_gradients(
        do, q, k_win, v_win, lse2[2], sums[2], dq, False, _window(spec), *rest
    )
    dk_cmp, dv_cmp = band_gradients(
        do, q, k_cmp, v_cmp, lse2[0], sums[0], dq, True, _compressed(spec), *rest
    )
    dk_sel, dv_sel = selected_gradients(
        do, q, k_sel, v_sel, lse2[1], sums[1], dq, True, index, spec, *rest
    )
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def _compressed(spec: NSASpec) -> list[int]:
    return [spec.block_len, spec.block_stride, 0]


def _window(spec: NSASpec) -> list[int]:
    return [1, 1, spec.window]


@torch.library.custom_op("nsa::triton_gated", mutates_args=())
def triton_gated(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o, block_index, then o and lse of the compressed, selected and window branch)."""
    keys_values = [k_cmp, v_cmp, k_sel, v_sel, k_win, v_win]
    return gated_forward(q, keys_values, gates, cu_seqlens, NSASpec(*pattern), scale)


@triton_gated.register_fake
def _(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, ...]:
    def output() -> Tensor:
        return q.new_empty(*q.shape[:3], v_cmp.shape[-1])

    def lse() -> Tensor:
        return q.new_empty(q.shape[:3], dtype=torch.float32)

    index = q.new_empty(*q.shape[:2], k_cmp.shape[2], pattern[3], dtype=torch.int32)
    return output(), index, output(), lse(), output(), lse(), output(), lse()


@torch.library.custom_op("nsa::triton_gated_backward", mutates_args=())
def triton_gated_backward(
    do: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    index: Tensor,
    o_cmp: Tensor,
    lse_cmp: Tensor,
    o_sel: Tensor,
    lse_sel: Tensor,
    o_win: Tensor,
    lse_win: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, of the three pairs of keys and values, and of the gates."""
    keys_values = [k_cmp, v_cmp, k_sel, v_sel, k_win, v_win]
    outputs, lses = [o_cmp, o_sel, o_win], [lse_cmp, lse_sel, lse_win]
    spec = NSASpec(*pattern)
    return gated_backward(do, q, keys_values, gates, index, outputs, lses, cu_seqlens, spec, scale)


@triton_gated_backward.register_fake
def _(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:8])


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, cu_seqlens, ctx.pattern, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros of seven outputs' size for gradients not there
    ctx.save_for_backward(*tensors, *output[1:], cu_seqlens)


def _backward(ctx: Any, do: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    gradients = triton_gated_backward(do, *ctx.saved_tensors, ctx.pattern, ctx.scale)
    return *gradients, None, None, None


triton_gated.register_autograd(_backward, setup_context=_setup_context)
