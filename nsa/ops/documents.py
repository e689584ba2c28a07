"""Packed documents: slices and offsets of their positions and compressed keys."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nsa.spec import NSASpec


def compressed_cu_seqlens(cu_seqlens: Tensor, spec: NSASpec) -> Tensor:
    """Offsets of each document's compressed keys, int32 [documents + 1].

    The block grid restarts at each document's first token, so a document shorter than
    `block_len` has no compressed key.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    blocks = torch.div(lengths - spec.block_len, spec.block_stride, rounding_mode="floor") + 1
    blocks = torch.where(lengths < spec.block_len, torch.zeros_like(blocks), blocks)
    return torch.cat([blocks.new_zeros(1), blocks.cumsum(0)]).to(torch.int32)


def block_starts(
    seq_len: int, cu_seqlens: Tensor | None, spec: NSASpec, device: torch.device
) -> Tensor:
    """First token of each compressed block, int64 [N]; with documents, reads N from the device."""
    if cu_seqlens is None:
        return torch.arange(spec.compressed_len(seq_len), device=device) * spec.block_stride
    blocks = compressed_cu_seqlens(cu_seqlens, spec)
    ascends = (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    ascends = ascends & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == seq_len)
    count = int(torch.where(ascends, blocks[-1], -1))  # the step's only host sync
    if not torch.compiler.is_compiling() and count < 0:
        raise ValueError(f"cu_seqlens does not ascend from 0 to T = {seq_len}; check the offsets")
    number = torch.arange(count, device=device) - repeat_per_document(blocks[:-1], blocks, count)
    return repeat_per_document(cu_seqlens[:-1], blocks, count) + number * spec.block_stride


def repeat_per_document(values: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Repeat each document's value for each of the `count` entries between its offsets."""
    return values.long().repeat_interleave((offsets[1:] - offsets[:-1]).long(), output_size=count)


def document_slices(seq_len: int, cu_seqlens: Tensor | None) -> list[slice]:
    """The positions of each document; one document if `cu_seqlens` is None."""
    if cu_seqlens is None:
        return [slice(0, seq_len)]
    return [slice(start, stop) for start, stop in pairwise(cu_seqlens.tolist())]


def compressed_slices(seq_len: int, cu_seqlens: Tensor | None, spec: NSASpec) -> list[slice]:
    """The compressed keys of each document, in the order of `document_slices`."""
    slices, start = [], 0
    for document in document_slices(seq_len, cu_seqlens):
        end = start + spec.compressed_len(document.stop - document.start)
        slices.append(slice(start, end))
        start = end
    return slices
