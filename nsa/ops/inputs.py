"""Inputs of the operations: packed documents, the tuples that ops receive, and argument checks."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.spec import NSASpec


def compressed_cu_seqlens(cu_seqlens: Tensor, spec: NSASpec) -> Tensor:
    """Return the offsets of each document's compressed keys, int32 [documents + 1].

    The block grid restarts at each document's first token, so a document shorter than
    `block_len` has no compressed key.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    blocks = torch.div(lengths - spec.block_len, spec.block_stride, rounding_mode="floor") + 1
    blocks = blocks.clamp(min=0)
    return torch.cat([blocks.new_zeros(1), blocks.cumsum(0)]).to(torch.int32)


def block_starts(
    seq_len: int, cu_seqlens: Tensor | None, spec: NSASpec, device: torch.device
) -> Tensor:
    """Return each compressed block's first token, int64 [N]; packed: N is read from the device."""
    if cu_seqlens is None:
        return torch.arange(spec.compressed_len(seq_len), device=device) * spec.block_stride
    offsets = compressed_cu_seqlens(cu_seqlens, spec)
    ascends = (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    ascends = ascends & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == seq_len)
    count = int(torch.where(ascends, offsets[-1], -1))  # one host sync, the step's only one
    if not torch.compiler.is_compiling() and count < 0:
        raise ValueError(f"cu_seqlens does not ascend from 0 to T = {seq_len}; check the offsets")
    number = torch.arange(count, device=device)
    number -= repeat_per_document(offsets[:-1], offsets, count)  # within its document
    return repeat_per_document(cu_seqlens[:-1], offsets, count) + number * spec.block_stride


def repeat_per_document(values: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Repeat each document's value for each of the `count` entries between its offsets."""
    return values.long().repeat_interleave((offsets[1:] - offsets[:-1]).long(), output_size=count)


def document_slices(seq_len: int, cu_seqlens: Tensor | None) -> list[slice]:
    """Return the positions of each document; one document if `cu_seqlens` is None."""
    if cu_seqlens is None:
        return [slice(0, seq_len)]
    return [slice(start, stop) for start, stop in pairwise(cu_seqlens.tolist())]


def compressed_slices(seq_len: int, cu_seqlens: Tensor | None, spec: NSASpec) -> list[slice]:
    """Return the compressed keys of each document, in the order of `document_slices`."""
    slices, start = [], 0
    for document in document_slices(seq_len, cu_seqlens):
        end = start + spec.compressed_len(document.stop - document.start)
        slices.append(slice(start, end))
        start = end
    return slices


class AttentionInputs(NamedTuple):
    """Inputs of one branch's attention; also the arguments of its custom ops."""

    q: Tensor  # [B, T, Hq, Dk]
    k: Tensor  # [B, T, Hkv, Dk]; compressed: N instead of T
    v: Tensor  # [B, T, Hkv, Dv]
    block_index: Tensor | None  # int32 [B, T, Hkv, n]; only in the selected branch
    cu_seqlens: Tensor | None
    branch: str  # compressed, selected or window
    spec: NSASpec
    scale: float

    def empty_outputs(self) -> tuple[Tensor, Tensor]:
        """Return uninitialised (o, lse), lse in at least float32."""
        dtype, rows = torch.promote_types(self.q.dtype, torch.float32), self.q.shape[:3]
        return self.q.new_empty(*rows, self.v.shape[-1]), self.q.new_empty(rows, dtype=dtype)


class SelectionInputs(NamedTuple):
    """Inputs of block selection; also the arguments of its custom ops."""

    q: Tensor  # [B, T, Hq, Dk]; the last T positions of the document
    k_cmp: Tensor  # [B, N, Hkv, Dk]
    lse: Tensor | None  # [B, T, Hq]; None: one query head per KV head ranks by its scores
    cu_seqlens: Tensor | None
    spec: NSASpec
    seq_len: int  # the document's length, T or more
    scale: float

    def empty_index(self) -> Tensor:
        """Return the op's uninitialised output, int32 [B, T, Hkv, n]."""
        shape = (*self.q.shape[:2], self.k_cmp.shape[2], self.spec.select_top)
        return self.q.new_empty(shape, dtype=torch.int32)


class GatedInputs(NamedTuple):
    """Inputs of the three branches and their gates; also the arguments of their custom op."""

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

    def branch(
        self, name: str, k: Tensor, v: Tensor, block_index: Tensor | None = None
    ) -> AttentionInputs:
        rest = self.cu_seqlens, name, self.spec, self.scale
        return AttentionInputs(self.q, k, v, block_index, *rest)

    def selection(self, lse: Tensor) -> SelectionInputs:
        """Return the inputs of block selection, with the compressed branch's lse."""
        rest = self.cu_seqlens, self.spec, self.q.shape[1], self.scale
        return SelectionInputs(self.q, self.k_cmp, lse, *rest)


class DecodeInputs(NamedTuple):
    """Inputs of decoding: each sequence's newest token attends over the buffers of a KV cache.

    The buffers hold that token's keys and values, too. Entries past a sequence's length, even NaN,
    never affect the result. Buffers that no branch reads may be None; selection also reads k_cmp.
    """

    q: Tensor  # [B, Hq, Dk]
    q_cmp: Tensor | None  # [B, Hkv, Dk]: queries that rank blocks; None: q
    k_cmp: Tensor | None  # [B, N, Hkv, D] from block 0 on
    v_cmp: Tensor | None
    k_sel: Tensor | None  # [B, S, Hkv, D] from position 0 on
    v_sel: Tensor | None
    k_win: Tensor | None  # [B, R, Hkv, D]: position p is at p % R; R ≥ w, or R ≥ all lengths
    v_win: Tensor | None
    gates: Tensor | None  # [B, Hq, branches]; None: one branch without a gate
    lengths: Tensor  # int64 [B], the newest token included
    spec: NSASpec
    branches: str  # names joined by +
    scale: float

    def pair(self, branch: str) -> tuple[Tensor, Tensor]:
        """Return a branch's buffers of keys and values."""
        return getattr(self, f"k_{branch}"), getattr(self, f"v_{branch}")


class SelectorLossInputs(NamedTuple):
    """Inputs of the selector loss; also the arguments of its custom ops."""

    k_cmp: Tensor  # [B, N, Hkv, Dk]; only k_cmp and q_cmp have a gradient
    q_cmp: Tensor | None  # [B, T, Hkv or Hq, Dk]: queries that rank blocks; None: q
    q: Tensor  # [B, T, Hq, Dk]
    k_sel: Tensor  # [B, T, Hkv, Dk]
    queries: Tensor  # int64 [S]: tokens, ascending
    cu_seqlens: Tensor | None
    spec: NSASpec
    scale: float

    @property
    def ranking(self) -> Tensor:
        """The queries that rank blocks."""
        return self.q if self.q_cmp is None else self.q_cmp

    def empty_outputs(self) -> tuple[Tensor, ...]:
        """Return the op's uninitialised outputs, in at least float32.

        loss; target and dp, each [B, Hkv, S, M] for M selection blocks; lse and Σ dp · p of each
        head of `ranking`, [2, B, Hkv, S, heads / Hkv].
        """
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        (batch, tokens, heads, _), kv_heads = self.ranking.shape, self.k_cmp.shape[2]
        per_query = batch, kv_heads, self.queries.shape[0]
        by_block = (*per_query, self.spec.select_blocks_len(tokens))
        by_head = (2, *per_query, heads // kv_heads)
        return tuple(self.q.new_empty(x, dtype=dtype) for x in ((), by_block, by_block, by_head))


class PackedLayout(NamedTuple):
    """Columns of a packed projection, and which outputs `rotary_pool` builds from them."""

    heads: int  # query heads
    kv_heads: int  # per set of keys and values
    key_dim: int
    value_dim: int
    kv_sets: int  # of keys and values: one for all branches, or one per branch
    gates: int = 0  # gate logits per query head
    first_set: int = 0  # sets before this one are not returned as rotated keys and values
    mean: bool = False  # k_cmp, v_cmp are the means of set 0 over compressed blocks
    pre_rope: bool = False  # k_cmp, v_cmp are set 0 without RoPE, one per token
    indexed: bool = False  # queries and keys of an index, both with kv_heads heads

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(sets, heads, size) of each part: q, k, v, an index's queries and keys, gate logits."""
        return [
            (1, self.heads, self.key_dim),
            (self.kv_sets, self.kv_heads, self.key_dim),
            (self.kv_sets, self.kv_heads, self.value_dim),
            (2 * self.indexed, self.kv_heads, self.key_dim),
            (1, self.heads, self.gates),
        ]

    @property
    def columns(self) -> list[int]:
        """Number of columns of each part, in the order of `shapes`."""
        return list(map(prod, self.shapes))

    def parts(self, packed: Tensor) -> list[Tensor]:
        """Return views of the parts in the order of `shapes`, [B, T, sets, heads, size]."""
        padding = packed.shape[-1] - sum(self.columns)
        *parts, _ = packed.split([*self.columns, padding], -1)
        return [x.unflatten(-1, shape) for x, shape in zip(parts, self.shapes, strict=True)]

    def returns_set(self, number: int) -> bool:
        """Whether the rotated keys and values of this set are outputs."""
        return self.first_set <= number < self.kv_sets


class RotaryPoolInputs(NamedTuple):
    """Inputs of `rotary_pool`; also the arguments of its custom ops."""

    packed: Tensor  # [B, T, P]
    cos: Tensor  # float32 [T, 1, Dk / 2]
    sin: Tensor
    block_tokens: Tensor | None  # int64 [N, l]: the tokens of each compressed block
    token_blocks: Tensor | None  # int64 [T, ⌈l/d⌉]: the blocks that cover each token, else -1
    layout: list[int]  # a PackedLayout

    def read_layout(self) -> PackedLayout:
        """Return `layout` as a PackedLayout; the compiler's symbolic integers become plain ones."""
        return PackedLayout._make(map(int, self.layout))

    def empty_outputs(self) -> tuple[Tensor, ...]:
        """Return uninitialised outputs; those that the layout lacks have no elements."""
        layout, (batch, tokens) = self.read_layout(), self.packed.shape[:2]
        q, k, v, index, gates = (shape[1:] for shape in layout.shapes)  # each (heads, size)
        compressed = tokens if layout.pre_rope else None
        if layout.mean:
            compressed = tokens if self.block_tokens is None else self.block_tokens.shape[0]
        outputs = [(q, tokens), (gates, tokens if layout.gates else None)]
        outputs += [(k, compressed), (v, compressed)]
        for number in range(3):  # a set per branch at most
            length = tokens if layout.returns_set(number) else None
            outputs += [(k, length), (v, length)]
        outputs += [(index, tokens if layout.indexed else None)] * 2
        new = self.packed.new_empty
        return tuple(new(0 if n is None else (batch, n, *shape)) for shape, n in outputs)


class PoolInputs(NamedTuple):
    """Inputs of `pool`; also the arguments of its custom ops."""

    x: Tensor  # [B, T, K, D] keys before RoPE, or values
    weight: Tensor  # [K, D, D]
    position: Tensor  # [K, l, D]
    scale: Tensor  # [K · D]
    cos: Tensor | None  # float32 [N, 1, D / 2]: RoPE at each block's last position; values: None
    sin: Tensor | None
    block_tokens: Tensor  # int64 [N, l]: the tokens of each compressed block
    token_blocks: Tensor  # int64 [T, ⌈l/d⌉]: the blocks that cover each token, else -1

    def empty_output(self) -> Tensor:
        """Return the uninitialised output [B, N, K, D]."""
        return self.x.new_empty(self.x.shape[0], self.block_tokens.shape[0], *self.x.shape[2:])


def check_heads(q: Tensor, **keys_or_values: Tensor) -> None:
    """Require [B, length, heads, size] tensors of one dtype and device; KV heads divide q's heads.

    Names begin with k for keys, v for values. Keys and values of one branch, such as `k_sel` and
    `v_sel`, may differ in head size only.
    """
    for name, x in {"q": q, **keys_or_values}.items():
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [B, T, heads, size]")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} and q is {q.dtype} on {q.device}; "
                "give both the same dtype and device"
            )
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {x.shape[0]} and q has {q.shape[0]}")
        if name[0] == "k" and x.shape[3] != q.shape[3]:
            raise ValueError(f"{name} has head size {x.shape[3]} and q has {q.shape[3]}")
        if x.shape[2] == 0 or q.shape[2] % x.shape[2]:
            raise ValueError(
                f"{name} has {x.shape[2]} heads, which do not divide q's {q.shape[2]} query heads"
            )
    for name, k in keys_or_values.items():
        value_name = f"v{name[1:]}"
        v = keys_or_values.get(value_name) if name[0] == "k" else None
        if v is not None and k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"{name} is {tuple(k.shape)} and {value_name} is {tuple(v.shape)}; "
                "they may differ in head size only"
            )


def check_scale(q: Tensor, scale: float | None) -> float:
    """Return the softmax scale, which defaults to Dk^-0.5."""
    if scale is None:
        return q.shape[-1] ** -0.5
    if not 1e-30 < scale < 1e30:  # beyond these it under- or overflows in float32
        raise ValueError(f"scale = {scale}: must be from 1e-30 to 1e30, or None for Dk^-0.5")
    return scale


def check_length(name: str, x: Tensor, length: int, required_by: str) -> None:
    """Require `length` entries along x's second dimension."""
    if x.shape[1] != length:
        raise ValueError(f"{name} has length {x.shape[1]}; {required_by} requires {length}")


def check_documents(cu_seqlens: Tensor | None, x: Tensor, name: str = "q") -> None:
    """Require integer cu_seqlens [documents + 1] that ascends from 0 to T, for x [1, T, ..]."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        kind = type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens is a {kind}; it must be a tensor, int32 [documents + 1]")
    integers = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not integers:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; "
            "it must be int32 [documents + 1], the offsets of packed documents; a mask is refused"
        )
    batch, seq_len = x.shape[:2]
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, but the batch is {batch}")
    if cu_seqlens.device != x.device:
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device} and {name} on {x.device}; "
            "give both the same device"
        )
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu":
        return  # reading values would break the graph or synchronise with the device
    offsets = cu_seqlens.tolist()
    for at, (before, after) in enumerate(pairwise(offsets), 1):
        if after < before:
            raise ValueError(
                f"cu_seqlens falls from {before} to {after} at [{at}]; it must ascend from 0 to T "
                f"= {seq_len}"
            )
    first, last = offsets[0], offsets[-1]
    if first != 0 or last != seq_len:
        raise ValueError(
            f"cu_seqlens goes from {first} to {last}; it must ascend from 0 to T = {seq_len}"
        )


def check_compressed(k_cmp: Tensor, seq_len: int, spec: NSASpec, cu_seqlens: Tensor | None) -> None:
    """Require one compressed key per compressed block of the documents."""
    if cu_seqlens is None:
        expected = spec.compressed_len(seq_len)
    elif cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        expected = int(compressed_cu_seqlens(cu_seqlens, spec)[-1])
    else:
        return
    check_length("k_cmp", k_cmp, expected, f"block_len {spec.block_len} at T = {seq_len}")
