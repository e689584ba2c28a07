"""Launchers and custom op of attention over selected blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.triton.band_op import outputs_like
from nsa.ops.triton.common import (
    LOG2E,
    attention_constants,
    backward_rows,
    document_arguments,
    slots,
)
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2
from nsa.ops.triton.selected import selected_forward_kernel, selected_queries_kernel
from nsa.ops.triton.selected_keys import add_parts_kernel, selected_keys_kernel
from nsa.ops.triton.selected_lists import queries_by_block, unite
from nsa.spec import NSASpec

CHUNK = 2048  # queries of one block's list that one program adds up
# Up to this many times `select_top` blocks, neighbouring queries select most of them between them,
# and large tiles over nearly all blocks are faster. An estimate, derived in docs/design/kernels.md.
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


class Mix(NamedTuple):
    """Inputs and output of the gated sum of branches, which the forward kernel writes if given."""

    o_cmp: Tensor | None = None  # [B, T, Hq, Dv]
    o_win: Tensor | None = None  # [B, T, Hq, Dv]
    gates: Tensor | None = None  # [B, T, Hq, 3]
    mixed: Tensor | None = None  # [B, T, Hq, Dv], written


NO_MIX = Mix()


def selected_forward(x: Selected, mix: Mix = NO_MIX) -> tuple[Tensor, Tensor]:
    """(o, lse)."""
    batch, seq_len, heads, _ = x.q.shape
    o = x.q.new_empty(batch, seq_len, heads, x.v.shape[-1])
    lse = x.q.new_empty(batch, seq_len, heads, dtype=torch.float32)
    arguments, constants = _arguments(x)
    arguments |= {"o": o, "lse": lse} | mix._asdict()
    _launch_by_query("forward", x, arguments, constants)
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
    arguments, constants = _arguments(x)
    arguments |= {"do": do.contiguous(), "lse2": lse2, "delta": delta}
    _launch_by_query("queries", x, arguments | {"dq": dq}, constants | {"ADD": add})
    return _key_gradients(x, arguments, constants)


def _arguments(x: Selected) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all kernels but the union take: arguments and constants."""
    arguments = {
        **{"q": x.q.contiguous(), "k": x.k.contiguous(), "v": x.v.contiguous()},
        **document_arguments(x.q.shape[1], x.cu_seqlens),
        **{"scale": x.scale * LOG2E, "scale_out": x.scale},
    }
    return arguments, attention_constants(x.q, x.k, x.v) | {"SELECT": x.spec.select_len}


def _launch_by_query(
    name: str, x: Selected, arguments: dict[str, Any], constants: dict[str, Any]
) -> None:
    """A kernel over tiles of queries: large ones that share most of their blocks, or small ones."""
    kernel = {"forward": selected_forward_kernel, "queries": selected_queries_kernel}[name]
    seq_len, group = x.q.shape[1], constants["GROUP"]
    dense = x.spec.select_blocks_len(seq_len) <= DENSE_BLOCKS * x.spec.select_top
    sizes = constants["KEY_P"], constants["VALUE_P"]
    config = choose_config(f"{'selected' if dense else 'gathered'}_{name}", sizes, x.q, seq_len)
    queries = min(max(config.rows, next_power_of_2(group)) // group, MAX_QUERIES)
    rows = max(16, next_power_of_2(queries * group))
    launch(
        kernel,
        (slots(seq_len, queries, x.cu_seqlens), x.k.shape[2], x.q.shape[0]),
        arguments | unite(x.block_index, x.cu_seqlens, x.spec, queries),
        constants | {"QUERIES": queries, "ROWS": rows, "KEYS": _block_keys(config, x.spec)},
        config,
    )


def _key_gradients(
    x: Selected, arguments: dict[str, Any], constants: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    batch, seq_len, groups, _ = x.k.shape
    spec = x.spec
    dk, dv = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x.k, x.v))
    offsets, queries = queries_by_block(x.block_index, x.cu_seqlens, spec)
    total_blocks = offsets.shape[-1] - 1
    # No list is longer than the sequence, so short ones leave no parts.
    rows = (2 * seq_len * spec.select_top // CHUNK + 1) * spec.select_len if seq_len > CHUNK else 1
    dk_part, dv_part = (
        y.new_empty(batch, rows, groups, y.shape[-1], dtype=torch.float32) for y in (x.k, x.v)
    )
    arguments = arguments | {
        **{"dk": dk, "dv": dv, "dk_part": dk_part, "dv_part": dv_part, "part_rows": rows},
        **{"offsets": offsets, "total_blocks": total_blocks},
        **{"queries": queries, "list_len": queries.shape[-1]},
    }
    config = choose_config(
        "selected_keys", (constants["KEY_P"], constants["VALUE_P"]), x.k, seq_len
    )
    keys = _block_keys(config, spec)
    constants = constants | {"CHUNK": CHUNK, "ROWS": config.rows, "KEYS": keys}
    grid = cdiv(spec.select_len, keys), groups * batch
    lists = seq_len * spec.select_top // CHUNK + total_blocks
    launch(selected_keys_kernel, (lists, *grid), arguments, constants, config)
    if seq_len > CHUNK:
        launch(add_parts_kernel, (total_blocks, *grid), arguments, constants, config)
    return dk, dv


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
