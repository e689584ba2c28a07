"""Launchers and custom op of attention over selected blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.triton.band_op import outputs_like
from nsa.ops.triton.common import LOG2E, backward_rows, constants_of, document_arguments, slots
from nsa.ops.triton.configs import SHORT, Config, choose_config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2
from nsa.ops.triton.selected import selected_forward_kernel, selected_queries_kernel
from nsa.ops.triton.selected_keys import add_parts_kernel, selected_keys_kernel
from nsa.ops.triton.selected_lists import blocks_by_tile, queries_by_block
from nsa.spec import NSASpec

# Queries of one block's list that one program adds up, at most. Fewer in small batches, so that the
# last programs to end are not long ones; but the parts are written to memory and read again.
CHUNK, MIN_CHUNK = 2048, 512
# A sequence of at most this many times `select_top` blocks takes large tiles: neighbouring queries
# together select most of its blocks. An estimate, derived in docs/design/kernels.md.
DENSE_BLOCKS = 4
MAX_QUERIES = 32  # of a tile: a bit each


class Selected(NamedTuple):
    """Inputs of the op."""

    q: Tensor  # [B, T, Hq, Dk]
    k: Tensor  # [B, T, Hkv, Dk]
    v: Tensor  # [B, T, Hkv, Dv]
    block_index: Tensor  # int32 [B, T, Hkv, n]
    cu_seqlens: Tensor | None
    spec: NSASpec
    scale: float


def selected_forward(x: Selected, gated: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(o, lse). `gated`: gates and the other branches' o, and `gated_sum`, which is written."""
    o, lse = outputs_like(x)
    gated = gated or dict.fromkeys(("o_cmp", "o_win", "gates", "gated_sum"))
    _launch_by_query("forward", x, gated | {"o": o, "lse": lse})
    return o, lse


def selected_backward(
    do: Tensor, x: Selected, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; the same from run to run."""
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    delta, lse2 = backward_rows(do, o, lse)
    return dq, *selected_gradients(do, x, lse2, delta, dq)


def selected_gradients(
    do: Tensor, x: Selected, lse2: Tensor, delta: Tensor, dq: Tensor, add: bool = False
) -> tuple[Tensor, Tensor]:
    """(dk, dv) from what `backward_rows` returned; dq is written, or with `add` added to."""
    per_query = {"do": do.contiguous(), "lse2": lse2, "delta": delta}
    _launch_by_query("queries", x, per_query | {"dq": dq}, add)
    return _key_gradients(x, per_query)


def _arguments(x: Selected) -> dict[str, Any]:
    """Arguments of all kernels that attend."""
    return {
        **{"q": x.q.contiguous(), "k": x.k.contiguous(), "v": x.v.contiguous()},
        **document_arguments(x.q.shape[1], x.cu_seqlens),
        **{"scale": x.scale * LOG2E, "scale_out": x.scale},
    }


def _launch_by_query(name: str, x: Selected, per_query: dict[str, Any], add: bool = False) -> None:
    """Launch over tiles of queries: large ones where they share most blocks, else small ones."""
    kernel = {"forward": selected_forward_kernel, "queries": selected_queries_kernel}[name]
    constants, seq_len, spec = constants_of(x.q, x.k, x.v), x.q.shape[1], x.spec
    dense = spec.select_blocks_len(seq_len) <= DENSE_BLOCKS * spec.select_top
    operation = f"{'selected' if dense else 'gathered'}_{name}"
    config = choose_config(operation, constants.padded, x.q, seq_len)
    group = constants.GROUP
    queries = min(max(config.rows, next_power_of_2(group)) // group, MAX_QUERIES)
    tile = {"QUERIES": queries, "ROWS": max(16, next_power_of_2(queries * group))}
    tile["KEYS"] = _block_keys(config, spec)
    constants = constants_of(x.q, x.k, x.v, **tile, SELECT=spec.select_len)
    launch(
        kernel,
        (slots(seq_len, queries, x.cu_seqlens), x.k.shape[2], x.q.shape[0]),
        _arguments(x) | per_query | blocks_by_tile(x.block_index, x.cu_seqlens, spec, queries),
        {"C": constants, "ADD": add},
        config,
    )


def _key_gradients(x: Selected, per_query: dict[str, Any]) -> tuple[Tensor, Tensor]:
    (batch, seq_len, groups, _), spec = x.k.shape, x.spec
    constants = constants_of(x.q, x.k, x.v)
    config = choose_config("selected_keys", constants.padded, x.k, seq_len)
    keys = _block_keys(config, spec)
    offsets, queries = queries_by_block(x.block_index, x.cu_seqlens, spec)
    total_blocks = offsets.shape[-1] - 1
    # Most queries select the first blocks, so those of all heads start first. Beyond SHORT tokens
    # heads follow each other instead: their queries together would not fit in L2.
    short = seq_len <= SHORT
    chunk = min(CHUNK, max(MIN_CHUNK, next_power_of_2(batch * seq_len) // (8 if short else 32)))
    # No list is longer than the sequence, so short ones leave no parts.
    parts = seq_len > chunk
    part_rows = (2 * seq_len * spec.select_top // chunk + 1) * spec.select_len if parts else 1
    arguments = _arguments(x) | per_query
    for name, y in (("dk", x.k), ("dv", x.v)):
        part = y.new_empty(batch, part_rows, groups, y.shape[-1], dtype=torch.float32)
        gradient = torch.empty_like(y, memory_format=torch.contiguous_format)
        arguments |= {name: gradient, f"{name}_part": part}
    arguments |= {"part_rows": part_rows, "offsets": offsets, "total_blocks": total_blocks}
    arguments |= {"queries": queries, "list_len": queries.shape[-1]}
    tile = {"ROWS": config.rows, "KEYS": keys, "CHUNK": chunk}
    fixed = {"C": constants_of(x.q, x.k, x.v, **tile, SELECT=spec.select_len)}
    steps, heads = cdiv(spec.select_len, keys), groups * batch
    programs = (seq_len * spec.select_top // chunk + total_blocks) * steps
    grid = (heads, programs) if short else (programs, heads)
    launch(selected_keys_kernel, grid, arguments, fixed | {"HEADS_FIRST": short}, config)
    if parts:
        launch(add_parts_kernel, (total_blocks, steps, heads), arguments, fixed, config)
    return arguments["dk"], arguments["dv"]


def _block_keys(config: Config, spec: NSASpec) -> int:
    """Keys of one step, no more than a block has."""
    return max(16, min(config.keys, next_power_of_2(spec.select_len)))


triton_selected = register(
    "nsa::triton_selected",
    Selected,
    selected_forward,
    fake=outputs_like,
    outputs=2,
    gradient=Gradient(selected_backward, inputs=3, outputs=1),
)
