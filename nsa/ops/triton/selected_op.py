"""Launchers and custom ops of attention over chosen blocks."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from nsa.ops.triton.common import (
    LOG2E,
    backward_arguments,
    backward_rows,
    offsets_of,
    shape_constants,
    slots,
)
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.launch import launch, rows_contiguous, strides
from nsa.ops.triton.selected import (
    selected_forward_kernel,
    selected_queries_kernel,
    union_kernel,
)
from nsa.ops.triton.selected_keys import add_parts_kernel, selected_keys_kernel
from nsa.spec import NSASpec

CHUNK = 2048  # queries of one block's list that one program adds up
# Up to so many times `select_top` blocks, neighbouring queries choose most of them between them,
# and large tiles that walk nearly all blocks win. An estimate: docs/kernels.md has the arithmetic.
DENSE_BLOCKS = 4
MOST_QUERIES = 32  # of a tile: a bit each


def selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor,
    cu_seqlens: Tensor | None,
    spec: NSASpec,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o, lse) over the chosen blocks."""
    q, k, v = map(rows_contiguous, (q, k, v))
    batch, seq_len, heads = q.shape[:3]
    o = q.new_empty(batch, seq_len, heads, v.shape[-1])
    lse = q.new_empty(batch, seq_len, heads, dtype=torch.float32)
    constants = _constants(q, k, v, cu_seqlens, spec)
    config, tile = _tile("forward", constants, seq_len, spec, q.dtype)
    cu, documents = offsets_of(cu_seqlens)
    lists = unite(block_index, cu_seqlens, spec, tile["QUERIES"])
    launch(
        selected_forward_kernel,
        (slots(seq_len, tile["QUERIES"], cu_seqlens), k.shape[2], batch),
        {"q": q, "k": k, "v": v, "o": o, "lse": lse, "cu": cu}
        | lists
        | strides(q=q, k=k, v=v, o=o, lse=lse)
        | {"seq_len": seq_len, "documents": documents, "scale": scale * LOG2E},
        constants | tile,
        config,
    )
    return o, lse


def selected_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    block_index: Tensor,
    cu_seqlens: Tensor | None,
    spec: NSASpec,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; the same from run to run."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    delta, lse2 = backward_rows(do, o, lse)
    chosen = _each_once(block_index, cu_seqlens, spec)
    dk, dv = selected_gradients(
        do, q, k, v, lse2, delta, dq, False, chosen, spec, cu_seqlens, scale
    )
    return dq, dk, dv


def _each_once(block_index: Tensor, cu_seqlens: Tensor | None, spec: NSASpec) -> Tensor:
    """Without blocks that a query names again or that begin after it; `select_blocks` names none.

    They would count again for keys and values, lists could outgrow the room for their parts, and
    a block's own queries would not be the first of its list.
    """
    ordered = block_index.sort(dim=-1).values
    again = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    position = torch.arange(block_index.shape[1], device=block_index.device)
    if cu_seqlens is not None:
        position = position - cu_seqlens[_documents(position, cu_seqlens)]
    later = ordered * spec.select_len > position[:, None, None]
    return ordered.masked_fill(again | later, -1)


def _documents(position: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which document each position is in."""
    return torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)


def selected_gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dq: Tensor,
    add: bool,
    block_index: Tensor,
    spec: NSASpec,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(dk, dv), and dq written, or added to what is there, from what `backward_rows` has made."""
    q, k, v, do = map(rows_contiguous, (q, k, v, do))
    batch, seq_len = q.shape[:2]
    constants = _constants(q, k, v, cu_seqlens, spec)
    inputs = backward_arguments(do, q, k, v, lse2, delta, cu_seqlens, scale)
    config, tile = _tile("queries", constants, seq_len, spec, q.dtype)
    launch(
        selected_queries_kernel,
        (slots(seq_len, tile["QUERIES"], cu_seqlens), k.shape[2], batch),
        inputs
        | unite(block_index, cu_seqlens, spec, tile["QUERIES"])
        | {"dq": dq}
        | strides(dq=dq),
        constants | tile | {"ADD": add},
        config,
    )
    return _key_gradients(inputs, constants, block_index, cu_seqlens, spec)


def unite(
    block_index: Tensor, cu_seqlens: Tensor | None, spec: NSASpec, queries: int
) -> dict[str, Any]:
    """The union of blocks of each tile of `queries`, as arguments of the kernels that walk it."""
    block_index = block_index.contiguous()
    batch, seq_len, groups, top = block_index.shape
    tiles = slots(seq_len, queries, cu_seqlens)
    room = min(queries * top, spec.select_blocks_len(seq_len))
    blocks = block_index.new_empty(batch, tiles, groups, room)
    lists = {
        "blocks": blocks,
        "members": torch.empty_like(blocks),
        "counts": block_index.new_empty(batch, tiles, groups),
    }
    list_strides = strides(list=blocks, counts=lists["counts"])
    cu, documents = offsets_of(cu_seqlens)
    queries_p, top_p = triton.next_power_of_2(queries), triton.next_power_of_2(top)
    launch(
        union_kernel,
        (tiles, groups, batch),
        {"chosen": block_index, "cu": cu, "seq_len": seq_len, "documents": documents}
        | lists
        | strides(chosen=block_index)
        | list_strides,
        {
            "TOP": top,
            "TOP_P": top_p,
            "SELECT": spec.select_len,
            "PACKED": cu_seqlens is not None,
            "QUERIES": queries,
            "QUERIES_P": queries_p,
            "BLOCKS": max(16, 4096 // (queries_p * top_p)),
        },
        Config(queries, 0, 4, 1),
    )
    return lists | list_strides


def queries_by_block(
    block_index: Tensor, cu_seqlens: Tensor | None, spec: NSASpec
) -> tuple[Tensor, Tensor]:
    """Who chose each block, ascending: offsets [B, K, blocks + 1] into queries [B, K, T * n].

    Packed documents number their blocks from start // select_len + document on, as `locate` does.
    Sorting is stable and waits for nothing on the host.
    """
    batch, seq_len, groups, top = block_index.shape
    total = slots(seq_len, spec.select_len, cu_seqlens)
    block = block_index
    if cu_seqlens is not None:
        document = _documents(torch.arange(seq_len, device=block.device), cu_seqlens)
        first = cu_seqlens[:-1] // spec.select_len + torch.arange(
            len(cu_seqlens) - 1, device=block.device
        )
        block = block + first[document][None, :, None, None]
    block = torch.where(block_index >= 0, block, total).to(torch.int32)
    # With top = 1 flattening makes a view, whose layout sorting would keep.
    block, order = block.transpose(1, 2).flatten(2).contiguous().sort(dim=-1, stable=True)
    bounds = torch.arange(total + 1, device=block.device, dtype=torch.int32)
    bounds = bounds.expand(batch, groups, -1).contiguous()
    offsets = torch.searchsorted(block, bounds, out_int32=True)
    return offsets, order.div(top, rounding_mode="floor").to(torch.int32)


def _key_gradients(
    inputs: dict[str, Any],
    constants: dict[str, Any],
    block_index: Tensor,
    cu_seqlens: Tensor | None,
    spec: NSASpec,
) -> tuple[Tensor, Tensor]:
    k, v = inputs["k"], inputs["v"]
    batch, seq_len, groups = k.shape[:3]
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    offsets, queries = queries_by_block(block_index, cu_seqlens, spec)
    total_blocks = offsets.shape[-1] - 1
    lists = {"offsets": offsets, "offsets_b": offsets.stride(0), "offsets_t": offsets.stride(1)}
    # No list is longer than the sequence, so short ones leave no parts.
    rows = (2 * seq_len * spec.select_top // CHUNK + 1) * spec.select_len if seq_len > CHUNK else 1
    dk_part, dv_part = (
        x.new_empty(batch, rows, groups, x.shape[-1], dtype=torch.float32) for x in (k, v)
    )
    outputs = {"dk": dk, "dv": dv, "dk_part": dk_part, "dv_part": dv_part}
    outputs |= strides(dk=dk, dv=dv, dk_part=dk_part, dv_part=dv_part)
    sizes = constants["KEY_P"], constants["VALUE_P"]
    config = choose_config("selected_keys", sizes, k.dtype)
    keys = _block_keys(config, spec)
    grid = triton.cdiv(spec.select_len, keys), groups * batch
    constants = constants | {"HEADS": groups, "CHUNK": CHUNK, "KEYS": keys}
    launch(
        selected_keys_kernel,
        (seq_len * spec.select_top // CHUNK + total_blocks, *grid),
        inputs
        | outputs
        | lists
        | {"queries": queries, "queries_b": queries.stride(0), "queries_t": queries.stride(1)}
        | {"total_blocks": total_blocks},
        constants | {"ROWS": config.rows},
        config,
    )
    if seq_len > CHUNK:
        shared = {name: inputs[name] for name in ("cu", "seq_len", "documents")}
        used = {key: x for key, x in constants.items() if key not in ("GROUP", "PRECISION")}
        launch(add_parts_kernel, (total_blocks, *grid), shared | outputs | lists, used, config)
    return dk, dv


def _tile(
    kernel: str, constants: dict[str, Any], seq_len: int, spec: NSASpec, dtype: torch.dtype
) -> tuple[Config, dict[str, int]]:
    """Tile sizes: large ones that share most of their blocks, or small ones."""
    dense = spec.select_blocks_len(seq_len) <= DENSE_BLOCKS * spec.select_top
    name = f"selected_{kernel}" if dense else f"gathered_{kernel}"
    config = choose_config(name, (constants["KEY_P"], constants["VALUE_P"]), dtype)
    group = constants["GROUP"]
    rows = max(config.rows, triton.next_power_of_2(group))
    queries = min(rows // group, MOST_QUERIES)
    rows = max(16, triton.next_power_of_2(queries * group))
    return config, {"QUERIES": queries, "ROWS": rows, "KEYS": _block_keys(config, spec)}


def _block_keys(config: Config, spec: NSASpec) -> int:
    return max(16, min(config.keys, triton.next_power_of_2(spec.select_len)))


def _constants(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, spec: NSASpec
) -> dict[str, Any]:
    return shape_constants(q, k, v, cu_seqlens) | {"SELECT": spec.select_len}


@torch.library.custom_op("nsa::triton_selected", mutates_args=())
def triton_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o, lse) over the chosen blocks."""
    return selected_forward(q, k, v, block_index, cu_seqlens, NSASpec(*pattern), scale)


@triton_selected.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("nsa::triton_selected_backward", mutates_args=())
def triton_selected_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    block_index: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    spec = NSASpec(*pattern)
    return selected_backward(do, q, k, v, o, lse, block_index, cu_seqlens, spec, scale)


@triton_selected_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, block_index, cu_seqlens, *ctx.static = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, block_index, cu_seqlens)


def _backward(ctx: Any, do: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = triton_selected_backward(do, *ctx.saved_tensors, *ctx.static)
    return *grads, None, None, None, None


triton_selected.register_autograd(_backward, setup_context=_setup_context)
