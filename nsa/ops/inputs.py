"""Inputs of attention, block selection, its loss and pooling, as every backend receives them."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.spec import NSASpec


class AttentionInputs(NamedTuple):
    """Inputs of one branch's attention; also the arguments of its custom ops."""

    q: Tensor  # [B, T, Hq, Dk]
    k: Tensor  # [B, N, Hkv, Dk]
    v: Tensor  # [B, N, Hkv, Dv]
    block_index: Tensor | None  # int32 [B, T, Hkv, n]; only in the selected branch
    cu_seqlens: Tensor | None
    branch: str  # compressed, selected or window
    spec: NSASpec
    scale: float


class SelectionInputs(NamedTuple):
    """Inputs of block selection; also the arguments of its custom ops."""

    q: Tensor  # [B, T, Hq, Dk]; the last T positions of the document
    k_cmp: Tensor  # [B, N, Hkv, Dk]
    lse: Tensor | None  # [B, T, Hq]; None: rank by the only query head's scores
    cu_seqlens: Tensor | None
    spec: NSASpec
    seq_len: int  # the document's length, T or more
    scale: float

    def empty_index(self) -> Tensor:
        """Uninitialised output of the op: int32 [B, T, Hkv, n]."""
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
        """One branch alone."""
        rest = self.cu_seqlens, name, self.spec, self.scale
        return AttentionInputs(self.q, k, v, block_index, *rest)

    def selection(self, lse: Tensor) -> SelectionInputs:
        """Block selection from the compressed branch's lse."""
        rest = self.cu_seqlens, self.spec, self.q.shape[1], self.scale
        return SelectionInputs(self.q, self.k_cmp, lse, *rest)


class SelectorInputs(NamedTuple):
    """Inputs of the selector loss; also the arguments of its custom ops."""

    k_cmp: Tensor  # [B, N, Hkv, Dk]; it and q_cmp have a gradient
    q_cmp: Tensor | None  # [B, T, Hkv or Hq, Dk]: queries of k_cmp; None: q
    q: Tensor  # [B, T, Hq, Dk]
    k_sel: Tensor  # [B, T, Hkv, Dk]
    queries: Tensor  # int64 [S]: tokens, ascending
    cu_seqlens: Tensor | None
    spec: NSASpec
    scale: float

    @property
    def ranking(self) -> Tensor:
        """The queries that rank blocks by compressed keys."""
        return self.q if self.q_cmp is None else self.q_cmp

    def empty_outputs(self) -> tuple[Tensor, ...]:
        """Uninitialised outputs of the op; all but the loss are at least float32 per KV head."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        (batch, tokens, heads, _), groups = self.ranking.shape, self.k_cmp.shape[2]
        per_query = batch, groups, self.queries.shape[0]
        by_block = (*per_query, self.spec.select_blocks_len(tokens))
        by_head = (2, *per_query, heads // groups)
        return tuple(self.q.new_empty(x, dtype=dtype) for x in ((), by_block, by_block, by_head))


class PackedLayout(NamedTuple):
    """Columns of a packed projection, and which outputs `rotary_pool` builds from them."""

    heads: int  # query heads
    kv_heads: int  # per set of keys and values
    key_dim: int
    value_dim: int
    kv_sets: int  # of keys and values: one for all branches, or one per branch
    gates: int = 0  # gate logits per query head
    first_set: int = 0  # rotated keys and values are returned from this set on
    mean: bool = False  # k_cmp and v_cmp: means of the first set over each compressed block
    pre_rope: bool = False  # k_cmp and v_cmp: the first set by token, without RoPE
    indexed: bool = False  # queries and keys of an index, both with kv_heads heads

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(sets, heads, size) of q, k, v, an index's queries and keys, and gate logits."""
        return [
            (1, self.heads, self.key_dim),
            (self.kv_sets, self.kv_heads, self.key_dim),
            (self.kv_sets, self.kv_heads, self.value_dim),
            (2 * self.indexed, self.kv_heads, self.key_dim),
            (1, self.heads, self.gates),
        ]

    @property
    def columns(self) -> list[int]:
        """Columns of each of `shapes`."""
        return list(map(prod, self.shapes))

    def parts(self, packed: Tensor) -> list[Tensor]:
        """Views of the parts in the order of `shapes`, [B, T, sets, heads, size]."""
        padding = packed.shape[-1] - sum(self.columns)
        *parts, _ = packed.split([*self.columns, padding], -1)
        return [x.unflatten(-1, shape) for x, shape in zip(parts, self.shapes, strict=True)]

    def by_token(self, number: int) -> bool:
        """Whether this set's rotated keys and values are outputs."""
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
        """`layout` with its fields' names; the compiler's symbolic integers become plain ones."""
        return PackedLayout._make(map(int, self.layout))

    def empty_outputs(self) -> tuple[Tensor, ...]:
        """Uninitialised outputs; those that the layout lacks have no elements."""
        layout, (batch, tokens) = self.read_layout(), self.packed.shape[:2]
        blocks = tokens if self.block_tokens is None else self.block_tokens.shape[0]
        cmp = blocks if layout.mean else tokens if layout.pre_rope else None
        sets = [tokens if layout.by_token(i) else None for i in range(3)]
        lengths = [tokens, tokens if layout.gates else None, cmp, cmp]
        lengths += [length for length in sets for _ in "kv"]
        lengths += [tokens if layout.indexed else None] * 2
        q, k, v, index, gates = (shape[1:] for shape in layout.shapes)
        shapes = q, gates, *(k, v) * 4, index, index
        return tuple(
            [
                self.packed.new_empty(0 if length is None else (batch, length, *shape))
                for length, shape in zip(lengths, shapes, strict=True)
            ]
        )


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
        """Uninitialised y: [B, N, K, D]."""
        return self.x.new_empty(len(self.x), len(self.block_tokens), *self.x.shape[2:])
