"""Packed projections for tests of `rotary_pool`, and its definition head by head."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nsa.ops.inputs import PackedLayout
from nsa.ops.rotary import RotaryPooled, rotary_pool

SIZES = {"heads": 4, "kv_heads": 2, "key_dim": 6, "value_dim": 5}
# Every layout that a model uses: kinds of attention, branch subsets, compressors and decoding.
LAYOUTS = {
    "all branches": PackedLayout(**SIZES, kv_sets=3, gates=3, first_set=1, mean=True),
    "shared": PackedLayout(**SIZES, kv_sets=1, gates=3, mean=True),
    "cmp": PackedLayout(**SIZES, kv_sets=1, gates=1, first_set=1, mean=True),
    "sel+win": PackedLayout(**SIZES, kv_sets=2, gates=2, mean=True),
    "win": PackedLayout(**SIZES, kv_sets=1, gates=1),
    "dense": PackedLayout(**SIZES, kv_sets=1),
    "mlp": PackedLayout(**SIZES, kv_sets=3, gates=3, first_set=1, pre_rope=True),
    "mlp, shared": PackedLayout(**SIZES, kv_sets=1, gates=3, pre_rope=True),
    "prefill": PackedLayout(**SIZES, kv_sets=3, gates=3, mean=True),
    "decoding with mlp": PackedLayout(**SIZES, kv_sets=2, gates=2, pre_rope=True),
    "index": PackedLayout(**SIZES, kv_sets=1, indexed=True),
    "keys that rank blocks": PackedLayout(0, 2, 6, 0, 1, first_set=1, mean=True),
    "one head": PackedLayout(1, 1, 2, 1, kv_sets=3, gates=3, first_set=1, mean=True),
}


@dataclass(frozen=True)
class Documents:
    """Documents of these lengths in each row of a batch, and compressed blocks of l every d."""

    lengths: tuple[int, ...]
    l: int = 4  # noqa: E741
    d: int = 2
    batch: int = 1

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def blocks(self) -> list[list[int]]:
        """The tokens of each compressed block."""
        return [
            list(range(first, first + self.l))
            for start, stop in pairwise([0, *accumulate(self.lengths)])
            for first in range(start, stop - self.l + 1, self.d)
        ]

    def tables(self) -> tuple[Tensor, Tensor]:
        """`block_tokens` and `token_blocks`."""
        blocks, most = self.blocks(), -(-self.l // self.d)
        covering = [[i for i, b in enumerate(blocks) if t in b] for t in range(self.tokens)]
        padded = [row + [-1] * (most - len(row)) for row in covering]
        return torch.tensor(blocks, dtype=torch.int64).view(-1, self.l), torch.tensor(padded)

    def packed(self, layout: PackedLayout, dtype: torch.dtype = torch.float64) -> Tensor:
        """A random projection; columns of padding up to a multiple of 8 must have no effect."""
        columns = -(-sum(layout.columns) // 8) * 8
        draw = torch.Generator().manual_seed(self.tokens)
        shape = self.batch, self.tokens, columns
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    def angles(self, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """cos and sin; positions restart with each document."""
        position = torch.tensor([float(t) for n in self.lengths for t in range(n)])
        angle = position[:, None] * torch.arange(1, layout.key_dim // 2 + 1)
        return angle.cos()[:, None], angle.sin()[:, None]


DOCUMENTS = [
    Documents((11,), batch=2),
    Documents((9, 0, 1, 8), l=5, d=3),
    Documents((3,), l=4, d=2),  # no block
    Documents((8,), l=4, d=4),  # blocks that do not overlap
    Documents((7, 2), l=3, d=1),
]


def computed(
    packed: Tensor, layout: PackedLayout, documents: Documents, backend: str = "auto"
) -> tuple[Tensor, ...]:
    """All outputs of `rotary_pool` that the layout has."""
    device = packed.device
    tables = (x.to(device) for x in (*documents.angles(layout), *documents.tables()))
    return flat(rotary_pool(packed, layout, *tables, backend=backend), layout)


def flat(parts: RotaryPooled, layout: PackedLayout) -> tuple[Tensor, ...]:
    outputs = [parts.q] + ([] if parts.gates is None else [parts.gates])
    outputs += parts.compressed or ()
    outputs += (x for pair in parts.kv_sets[layout.first_set : layout.kv_sets] for x in pair)
    return *outputs, *(parts.indexed or ())


def defined(packed: Tensor, layout: PackedLayout, documents: Documents) -> tuple[Tensor, ...]:
    """The same by the definition: head by head and block by block."""
    cos, sin = (x[:, 0].to(packed.device) for x in documents.angles(layout))
    column = 0

    def heads(count: int, size: int) -> list[Tensor]:
        nonlocal column
        first, column = column, column + count * size
        return [packed[..., first + i * size : first + (i + 1) * size] for i in range(count)]

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q = heads(layout.heads, layout.key_dim)
    k = [heads(layout.kv_heads, layout.key_dim) for _ in range(layout.kv_sets)]
    v = [heads(layout.kv_heads, layout.value_dim) for _ in range(layout.kv_sets)]
    index_q, index_k = (heads(layout.indexed * layout.kv_heads, layout.key_dim) for _ in "qk")
    gates = heads(layout.heads, layout.gates)
    outputs = [[rotated(x) for x in q] or [packed.new_empty(*packed.shape[:2], layout.key_dim)]]
    outputs += [[x.sigmoid() for x in gates]] if layout.gates else []
    if layout.mean:
        for kind in ([rotated(x) for x in k[0]], v[0]):
            outputs += [[means(x, documents.blocks()) for x in kind]]
    if layout.pre_rope:
        outputs += [k[0], v[0]]
    for number in range(layout.first_set, layout.kv_sets):
        outputs += [[rotated(x) for x in k[number]], v[number]]
    outputs += [[rotated(x) for x in index_q], index_k] if layout.indexed else []
    stacked = tuple(torch.stack(x, 2) for x in outputs)
    return stacked if layout.heads else (stacked[0][:, :, :0], *stacked[1:])


def means(x: Tensor, blocks: list[list[int]]) -> Tensor:
    """[B, T, D] to [B, N, D]."""
    return torch.stack([x[:, block].mean(1) for block in blocks], 1) if blocks else x[:, :0]
