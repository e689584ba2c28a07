"""Launchers and custom op of attention over selected blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import AttentionInputs
from nsa.ops.triton.band_op import outputs_like
from nsa.ops.triton.common import (
    LOG2E,
    Constants,
    backward_rows,
    constants_of,
    document_offsets,
    max_tiles,
)
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


def selected_forward(
    x: AttentionInputs,
    o_cmp: Tensor | None = None,
    o_win: Tensor | None = None,
    gates: Tensor | None = None,
    gated_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse). With gates and the other branches' o, `gated_sum` is written too."""
    assert x.block_index is not None
    o, lse = outputs_like(x)
    C, grid, config = _query_tiles("forward", x)
    blocks, members, counts = blocks_by_tile(x.block_index, x.cu_seqlens, x.spec, C.QUERIES)
    cu, documents = document_offsets(x.cu_seqlens)
    launch(
        selected_forward_kernel, grid, config,
        q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous(), o=o, lse=lse,
        o_cmp=o_cmp, o_win=o_win, gates=gates, gated_sum=gated_sum,
        cu=cu, blocks=blocks, members=members, counts=counts,
        seq_len=x.q.shape[1], documents=documents, list_len=blocks.shape[-1],
        scale=x.scale * LOG2E, C=C,
    )  # fmt: skip
    return o, lse


def selected_backward(
    do: Tensor, x: AttentionInputs, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; the same from run to run."""
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    do = do.contiguous()
    delta, lse2 = backward_rows(do, o, lse)
    return dq, *selected_gradients(do, x, lse2, delta, dq)


def selected_gradients(
    do: Tensor, x: AttentionInputs, lse2: Tensor, delta: Tensor, dq: Tensor, add: bool = False
) -> tuple[Tensor, Tensor]:
    """(dk, dv) from what `backward_rows` returned; dq is written, or with `add` added to."""
    assert x.block_index is not None
    C, grid, config = _query_tiles("queries", x)
    blocks, members, counts = blocks_by_tile(x.block_index, x.cu_seqlens, x.spec, C.QUERIES)
    cu, documents = document_offsets(x.cu_seqlens)
    launch(
        selected_queries_kernel, grid, config,
        q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous(),
        do=do, lse2=lse2, delta=delta, dq=dq,
        cu=cu, blocks=blocks, members=members, counts=counts,
        seq_len=x.q.shape[1], documents=documents, list_len=blocks.shape[-1],
        scale=x.scale * LOG2E, scale_out=x.scale, C=C, ADD=add,
    )  # fmt: skip
    return _key_gradients(do, x, lse2, delta)


def _query_tiles(name: str, x: AttentionInputs) -> tuple[Constants, tuple[int, ...], Config]:
    """Tiles of queries: large ones where they share most blocks, else small ones; and a grid."""
    (batch, seq_len, groups, _), spec = x.k.shape, x.spec
    constants = constants_of(x.q, x.k, x.v)
    dense = spec.select_blocks_len(seq_len) <= DENSE_BLOCKS * spec.select_top
    operation = f"{'selected' if dense else 'gathered'}_{name}"
    config = choose_config(operation, constants.padded, x.q, seq_len)
    group = constants.GROUP
    queries = min(max(config.rows, next_power_of_2(group)) // group, MAX_QUERIES)
    rows, keys = max(16, next_power_of_2(queries * group)), _block_keys(config, spec)
    constants = constants_of(
        x.q, x.k, x.v, QUERIES=queries, ROWS=rows, KEYS=keys, SELECT=spec.select_len
    )
    return constants, (max_tiles(seq_len, queries, x.cu_seqlens), groups, batch), config


def _key_gradients(
    do: Tensor, x: AttentionInputs, lse2: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    (batch, seq_len, groups, _), spec = x.k.shape, x.spec
    config = choose_config("selected_keys", constants_of(x.q, x.k, x.v).padded, x.k, seq_len)
    keys = _block_keys(config, spec)
    assert x.block_index is not None
    offsets, queries = queries_by_block(x.block_index, x.cu_seqlens, spec)
    total_blocks = offsets.shape[-1] - 1
    # Most queries select the first blocks, so those of all heads start first. Beyond SHORT tokens
    # heads follow each other instead: their queries together would not fit in L2.
    short = seq_len <= SHORT
    chunk = min(CHUNK, max(MIN_CHUNK, next_power_of_2(batch * seq_len) // (8 if short else 32)))
    # No list is longer than the sequence, so short ones leave no parts.
    parts = seq_len > chunk
    part_rows = (2 * seq_len * spec.select_top // chunk + 1) * spec.select_len if parts else 1
    dk, dv = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x.k, x.v))
    dk_part, dv_part = (
        y.new_empty(batch, part_rows, groups, y.shape[-1], dtype=torch.float32) for y in (x.k, x.v)
    )
    cu, documents = document_offsets(x.cu_seqlens)
    C = constants_of(
        x.q, x.k, x.v, ROWS=config.rows, KEYS=keys, CHUNK=chunk, SELECT=spec.select_len
    )
    steps, heads = cdiv(spec.select_len, keys), groups * batch
    programs = (seq_len * spec.select_top // chunk + total_blocks) * steps
    launch(
        selected_keys_kernel, (heads, programs) if short else (programs, heads), config,
        q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous(),
        do=do, lse2=lse2, delta=delta, dk=dk, dv=dv, dk_part=dk_part, dv_part=dv_part,
        cu=cu, offsets=offsets, queries=queries,
        seq_len=seq_len, documents=documents, total_blocks=total_blocks,
        list_len=queries.shape[-1], part_rows=part_rows,
        scale=x.scale * LOG2E, scale_out=x.scale, C=C, HEADS_FIRST=short,
    )  # fmt: skip
    if parts:
        launch(
            add_parts_kernel, (total_blocks, steps, heads), config,
            dk=dk, dv=dv, dk_part=dk_part, dv_part=dv_part, cu=cu, offsets=offsets,
            seq_len=seq_len, documents=documents, total_blocks=total_blocks,
            part_rows=part_rows, C=C,
        )  # fmt: skip
    return dk, dv


def _block_keys(config: Config, spec: NSASpec) -> int:
    """Keys of one step, no more than a block has."""
    return max(16, min(config.keys, next_power_of_2(spec.select_len)))


triton_selected = register(
    "nsa::triton_selected",
    AttentionInputs,
    selected_forward,
    fake=outputs_like,
    outputs=2,
    gradient=Gradient(selected_backward, inputs=3, outputs=1),
)
