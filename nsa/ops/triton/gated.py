"""The three branches and their gates as one custom op, forward and backward.

Forward: one kernel computes the compressed branch and the window, which read the same queries; the
selected branch's kernel also adds up the gated branches.

Backward: no branch's gradient g · do is stored. With p a branch's softmax, g its gate and the row
sums e = Σ do · o, which are also the gate's gradient, the branch's scores get the gradient
(g·p) · (dp - e) and its values (g·p) · do. Since g·p = exp(s - (lse - ln g)), the kernels that a
branch has without gates compute this, given lse - ln g as lse and e as the row sums. One kernel
computes lse - ln g and e of all branches, and dq of the compressed branch and the window; so
queries and do are read once and dq is written once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import SelectionInputs
from nsa.ops.triton.band import (
    band_attention,
    band_key_gradients,
    band_query_gradient,
    row_tile,
)
from nsa.ops.triton.band_op import Band, add_parts, band_forward, key_parts
from nsa.ops.triton.common import (
    LOG2E,
    attention_constants,
    binary_lse,
    document_arguments,
    kernel,
    keys_before,
    load_rows,
    slots,
    store_query_gradient,
    store_rows,
)
from nsa.ops.triton.configs import choose_config, one_tile
from nsa.ops.triton.flash_window import is_faster
from nsa.ops.triton.launch import cdiv, launch
from nsa.ops.triton.select import select_forward
from nsa.ops.triton.selected_op import Mix, Selected, selected_forward, selected_gradients
from nsa.spec import NSASpec


@triton.jit
def _branch_rows(
    do, o, gates, lse, dgates, sums, lse2, first, at, rows, valid,
    BRANCH: tl.constexpr, VALUE: tl.constexpr, VALUE_P: tl.constexpr,
):  # fmt: skip
    """Store and return one branch's lse - ln gate in base 2 and its row sums, [ROWS]."""
    o_tile = load_rows(o + first * VALUE, at, VALUE, VALUE, VALUE_P, valid)  # [ROWS, VALUE_P]
    total = tl.sum(o_tile.to(tl.float32) * do.to(tl.float32), 1)
    row = first + at
    gate = tl.load(gates + row * 3 + BRANCH, mask=valid, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + row, mask=valid, other=float("-inf"))
    # A closed gate gives +inf and so p = 0, as for a row that saw nothing.
    closed = gate == 0.0
    shifted = binary_lse(row_lse) - tl.log2(tl.where(closed, 1.0, gate))
    shifted = tl.where(closed, float("inf"), shifted)
    tl.store(dgates + row * 3 + BRANCH, total.to(dgates.dtype.element_ty), mask=valid)
    tl.store(sums + BRANCH * rows + row, total, mask=valid)
    tl.store(lse2 + BRANCH * rows + row, shifted, mask=valid)
    return shifted, total


@kernel
def gated_forward_kernel(
    q, k_win, v_win, k_cmp, v_cmp, o_cmp, o_win, lse_cmp, lse_win, cu,
    seq_len, key_len, documents, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of rows, for the compressed branch and the window."""
    document, token, length, first_row, row, at, t, valid = row_tile(
        cu, documents, seq_len, HEADS, GROUP, ROWS
    )
    if first_row < length * GROUP:
        head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        cmp_key = (batch * key_len + keys_before(cu, document, LEN, STRIDE)) * HEADS + head
        q_tile = load_rows(q + row * KEY, at, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
        key = token * HEADS + head
        out, logsum = band_attention(
            q_tile, k_win + key * KEY, v_win + key * VALUE, t, first_row, length, scale,
            HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, 1, 1, WINDOW, ROWS, KEYS,
        )  # fmt: skip
        store_rows(o_win + row * VALUE, at, VALUE, out, VALUE, VALUE_P, valid)
        tl.store(lse_win + row + at, logsum, mask=valid)
        out, logsum = band_attention(
            q_tile, k_cmp + cmp_key * KEY, v_cmp + cmp_key * VALUE, t, first_row, length, scale,
            HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, LEN, STRIDE, 0, ROWS, KEYS,
        )  # fmt: skip
        store_rows(o_cmp + row * VALUE, at, VALUE, out, VALUE, VALUE_P, valid)
        tl.store(lse_cmp + row + at, logsum, mask=valid)


@kernel
def gated_queries_kernel(
    q, k_win, v_win, k_cmp, v_cmp, do, o_cmp, o_sel, o_win, gates, lse_cmp, lse_sel, lse_win,
    dgates, sums, lse2, dq, cu, seq_len, key_len, documents, rows, scale, scale_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of one tile of rows, from the window and the compressed branch if there is an o_cmp.

    Also Σ do·o, which is the gate's gradient, and lse - ln gate in base 2, of these branches and of
    the selected one.
    """
    document, token, length, first_row, row, at, t, valid = row_tile(
        cu, documents, seq_len, HEADS, GROUP, ROWS
    )
    if first_row < length * GROUP:
        head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        do_tile = load_rows(do + row * VALUE, at, VALUE, VALUE, VALUE_P, valid)  # [ROWS, VALUE_P]
        total = tl.cast(rows, tl.int64)
        _branch_rows(do_tile, o_sel, gates, lse_sel, dgates, sums, lse2, row, at, total, valid,
                     1, VALUE, VALUE_P)  # fmt: skip
        if o_cmp is not None:
            cmp_lse, cmp_sum = _branch_rows(
                do_tile, o_cmp, gates, lse_cmp, dgates, sums, lse2, row, at, total, valid,
                0, VALUE, VALUE_P,
            )  # fmt: skip
        win_lse, win_sum = _branch_rows(
            do_tile, o_win, gates, lse_win, dgates, sums, lse2, row, at, total, valid,
            2, VALUE, VALUE_P,
        )  # fmt: skip
        q_tile = load_rows(q + row * KEY, at, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
        acc = tl.zeros([ROWS, KEY_P], tl.float32)
        key = token * HEADS + head
        acc = band_query_gradient(
            q_tile, k_win + key * KEY, v_win + key * VALUE, do_tile, win_lse, win_sum, acc,
            t, first_row, length, scale,
            HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, 1, 1, WINDOW, ROWS, KEYS,
        )  # fmt: skip
        if o_cmp is not None:
            key = (batch * key_len + keys_before(cu, document, LEN, STRIDE)) * HEADS + head
            acc = band_query_gradient(
                q_tile, k_cmp + key * KEY, v_cmp + key * VALUE, do_tile, cmp_lse, cmp_sum, acc,
                t, first_row, length, scale,
                HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, LEN, STRIDE, 0, ROWS, KEYS,
            )  # fmt: skip
        store_query_gradient(dq + row * KEY, at, acc, scale_out, KEY, KEY_P, valid, False)


@kernel
def gated_keys_kernel(
    q, k_win, v_win, k_cmp, v_cmp, do, lse_win, sums_win, lse_cmp, sums_cmp,
    dk_win, dv_win, dk_cmp, dv_cmp, gates, dgates, dq, cu,
    seq_len, key_len, documents, split_len, cmp_tiles, cmp_programs, scale, scale_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CMP_ROWS: tl.constexpr, CMP_KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of compressed keys or of the window's; dq as `band_key_gradients` says.

    Programs of both branches run at the same time and share q and do in L2. The compressed ones,
    which see the most queries, begin.
    """
    i = tl.program_id(0)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    batches = tl.num_programs(1) // HEADS
    if i < cmp_programs:
        band_key_gradients(
            q, k_cmp, v_cmp, do, lse_cmp, sums_cmp, dk_cmp, dv_cmp, gates, dgates, dq,
            cu, i % cmp_tiles, i // cmp_tiles, head, batch, batches,
            seq_len, key_len, documents, split_len, scale, scale_out,
            HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, LEN, STRIDE, 0, CMP_ROWS, CMP_KEYS,
        )  # fmt: skip
    else:
        band_key_gradients(
            q, k_win, v_win, do, lse_win, sums_win, dk_win, dv_win, None, None, None,
            cu, i - cmp_programs, 0, head, batch, batches,
            seq_len, seq_len, documents, seq_len, scale, scale_out,
            HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, 1, 1, WINDOW, ROWS, KEYS,
        )  # fmt: skip


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

    def one_tile(self) -> tuple[int, int] | None:
        """(rows, keys) of a tile with all compressed keys: their backward pass needs no o_cmp."""
        head = max(self.q.shape[-1], self.v_cmp.shape[-1])
        return one_tile(self.k_cmp.shape[1], head, self.q.dtype.itemsize)

    def window(self) -> Band:
        """The window branch alone."""
        band = [1, 1, self.spec.window]
        return Band(self.q, self.k_win, self.v_win, self.cu_seqlens, band, self.scale)


def gated_forward(x: Gated) -> tuple[Tensor, ...]:
    """(o, block_index, then o and lse of the compressed, selected and window branch)."""
    o_cmp, lse_cmp, o_win, lse_win = _bands(x)
    index = select_forward(x.selection(lse_cmp))
    o = torch.empty_like(o_cmp)
    mix = Mix(o_cmp, o_win, x.gates.contiguous(), o)
    o_sel, lse_sel = selected_forward(x.selected(index), mix)
    o_cmp = o_cmp.new_empty(0) if x.one_tile() else o_cmp
    return o, index, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def _bands(x: Gated) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o and lse of the compressed branch and of the window."""
    constants = attention_constants(x.q, x.k_win, x.v_win)
    if is_faster(x.q, x.v_win, (constants["KEY_P"], constants["VALUE_P"])):
        return *band_forward(x.compressed()), *band_forward(x.window())
    shape = x.q.shape[:3]
    o_cmp, o_win = (x.q.new_empty(*shape, x.v_win.shape[-1]) for _ in range(2))
    lse_cmp, lse_win = (x.q.new_empty(shape, dtype=torch.float32) for _ in range(2))
    outputs = {"o_cmp": o_cmp, "lse_cmp": lse_cmp, "o_win": o_win, "lse_win": lse_win}
    _launch(gated_forward_kernel, "gated_forward", x, outputs)
    return o_cmp, lse_cmp, o_win, lse_win


def _launch(kernel_function: Any, operation: str, x: Gated, tensors: dict[str, Any]) -> None:
    """Launch over the rows of all queries; `tensors`: arguments that only this kernel takes."""
    constants, spec = attention_constants(x.q, x.k_win, x.v_win), x.spec
    batch, seq_len = x.q.shape[:2]
    sizes = constants["KEY_P"], constants["VALUE_P"]
    config = choose_config(operation, sizes, x.q, seq_len)
    names = "q", "k_win", "v_win", "k_cmp", "v_cmp"
    tensors |= {name: getattr(x, name).contiguous() for name in names}
    tensors |= document_arguments(seq_len, x.cu_seqlens)
    launch(
        kernel_function,
        (slots(seq_len * constants["GROUP"], config.rows, x.cu_seqlens), x.k_win.shape[2], batch),
        tensors
        | {"key_len": x.k_cmp.shape[1], "rows": x.q.shape[:3].numel()}
        | {"scale": x.scale * LOG2E, "scale_out": x.scale},
        constants
        | {"LEN": spec.block_len, "STRIDE": spec.block_stride, "WINDOW": spec.window}
        | {"ROWS": config.rows, "KEYS": config.keys},
        config,
    )


def gated_backward(do: Tensor, x: Gated, index: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, of the three pairs of keys and values, and of the gates.

    `saved`: o and lse of the compressed, selected and window branch.
    """
    do = do.contiguous()
    dq, dgates, all_sums, all_lse2 = query_gradients(do, x, *saved)
    sums, lse2 = all_sums.unbind(), all_lse2.unbind()  # by branch
    rows: dict[str, Any] = {"do": do, "lse_win": lse2[2], "sums_win": sums[2], "lse_cmp": lse2[0]}
    rows |= {"sums_cmp": sums[0], "gates": None, "dgates": None, "dq": None}
    if x.one_tile():
        rows |= {"lse_cmp": saved[1].contiguous(), "gates": x.gates.contiguous()}
        rows |= {"dgates": dgates, "dq": dq}
    dk_win, dv_win, dk_cmp, dv_cmp = _band_key_gradients(x, rows)
    dk_sel, dv_sel = selected_gradients(do, x.selected(index), lse2[1], sums[1], dq, add=True)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def _band_key_gradients(x: Gated, rows: dict[str, Any]) -> tuple[Tensor, ...]:
    """dk and dv of the window and of the compressed branch; `rows`: what is stored by query."""
    constants, spec, seq_len = attention_constants(x.q, x.k_win, x.v_win), x.spec, x.q.shape[1]
    config = choose_config("gated_keys", (constants["KEY_P"], constants["VALUE_P"]), x.q, seq_len)
    cmp_rows, cmp_keys = x.one_tile() or config[:2]
    dk_cmp, dv_cmp, splits = key_parts(x.compressed())
    dk_win, dv_win, _ = key_parts(x.window())
    tiles = slots(seq_len, cmp_keys * spec.block_stride, x.cu_seqlens)
    programs = tiles * splits
    names = "q", "k_win", "v_win", "k_cmp", "v_cmp"
    launch(
        gated_keys_kernel,
        (programs + slots(seq_len, config.keys, x.cu_seqlens), x.k_win.shape[2] * len(x.q)),
        {name: getattr(x, name).contiguous() for name in names}
        | rows
        | document_arguments(seq_len, x.cu_seqlens)
        | {"dk_win": dk_win, "dv_win": dv_win, "dk_cmp": dk_cmp, "dv_cmp": dv_cmp}
        | {"key_len": x.k_cmp.shape[1], "split_len": cdiv(seq_len, splits)}
        | {"cmp_tiles": tiles, "cmp_programs": programs}
        | {"scale": x.scale * LOG2E, "scale_out": x.scale},
        constants
        | {"LEN": spec.block_len, "STRIDE": spec.block_stride, "WINDOW": spec.window}
        | {"ROWS": config.rows, "KEYS": config.keys, "CMP_ROWS": cmp_rows}
        | {"CMP_KEYS": cmp_keys},
        config,
    )
    return dk_win[0], dv_win[0], add_parts(dk_cmp, x.k_cmp.dtype), add_parts(dv_cmp, x.v_cmp.dtype)


def query_gradients(
    do: Tensor, x: Gated, *outputs_and_lses: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dgates, Σ do·o, lse - ln gate in base 2); the last two are float32 [3, B, T, H].

    The selected branch's part of dq is missing; with `one_tile` all of the compressed branch is.
    """
    names = "o_cmp", "lse_cmp", "o_sel", "lse_sel", "o_win", "lse_win"
    gates = x.gates.contiguous()
    dgates = torch.empty_like(gates)
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    sums, lse2 = (do.new_empty(3, *x.q.shape[:3], dtype=torch.float32) for _ in range(2))
    tensors: dict[str, Any] = dict(zip(names, outputs_and_lses, strict=True))
    if x.one_tile():
        tensors["o_cmp"] = None
    tensors |= {"do": do, "gates": gates, "dgates": dgates, "sums": sums, "lse2": lse2, "dq": dq}
    _launch(gated_queries_kernel, "gated_queries", x, tensors)
    return dq, dgates, sums, lse2


def _fake(x: Gated) -> tuple[Tensor, ...]:
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    index, o = x.selection(lse).empty_index(), x.q.new_empty(*x.q.shape[:3], x.v_cmp.shape[-1])
    o_cmp, *rest = (torch.empty_like(y) for _ in range(3) for y in (o, lse))
    return o, index, o.new_empty(0) if x.one_tile() else o_cmp, *rest


triton_gated = register(
    "nsa::triton_gated",
    Gated,
    gated_forward,
    _fake,
    outputs=8,
    gradient=Gradient(gated_backward, inputs=8, outputs=1, saved=slice(1, None)),
)
