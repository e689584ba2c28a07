"""Fused operations by their definitions: SwiGLU, RMSNorm, RoPE with means, φ `pool`, selector loss.

Each is a function of tensors and a backend; the definition, in float64, is a backend too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import NSASpec, PackedLayout, add_rms_norm, rotary_pool, selector_loss
from nsa.ops import swiglu as ops_swiglu
from nsa.ops.inputs import compressed_slices, document_slices
from nsa.ops.pooling import pool as ops_pool
from tests.ops.cases import Case, Inputs, random_cases, with_gradients
from tests.ops.triton.parity import DEVICE, RULE, assert_exact_enough

EPS = 1e-3
TINY = 2.0**-126


@dataclass(frozen=True)
class Operation:
    """One operation on inputs of one size, and the kernels that it launches in both passes."""

    name: str
    inputs: Callable[[], list[Tensor]]  # on the CPU
    run: Callable[..., Any]  # (backend, *inputs)
    defined: Callable[..., Any]  # (*inputs)
    kernels: tuple[str, ...]
    size: str

    def results(
        self, backend: str, dtype: torch.dtype, change: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor]:
        """Outputs and gradients on the CPU, of inputs rounded to float32 and to `dtype`."""
        device = DEVICE if backend == "triton" else torch.device("cpu")
        given = [x.float().to(device, dtype) for x in self.inputs()]
        given = [change(x) for x in given] if change else given
        run = self.defined if backend == "definition" else lambda *x: self.run(backend, *x)
        return [x.cpu() for x in with_gradients(run, given)]

    def assert_parity(self) -> None:
        """The kernels lose little more than PyTorch does in float32."""
        assert_exact_enough(*(self.results(backend, dtype) for backend, dtype in RULE))

    def __str__(self) -> str:
        return f"{self.name}-{self.size}"


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return std * torch.randn(shape, generator=draw, dtype=torch.float64)


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers, of which no two are adjacent in memory."""
    return torch.stack([x, x], -1)[..., 0]


def swiglu(shape: tuple[int, ...], width: int) -> Operation:
    """gate_up of this shape: columns of padding follow gate and up."""

    def defined(gate_up: Tensor) -> Tensor:
        return F.silu(gate_up[..., :width]) * gate_up[..., width : 2 * width]

    return Operation(
        "swiglu",
        lambda: [normal(*shape, std=3)],
        lambda backend, x: ops_swiglu(x, width, backend=backend),
        defined,
        ("swiglu_kernel", "swiglu_backward_kernel"),
        f"{shape}",
    )


def norm(shape: tuple[int, ...], outputs: str = "both", residual: bool = True) -> Operation:
    """x, its residual `delta` and a weight; of the outputs, total and normed, those named."""

    def picked(total: Tensor, normed: Tensor) -> Any:
        return {"both": (total, normed), "total": total, "normed": normed}[outputs]

    def run(backend: str, x: Tensor, weight: Tensor, delta: Tensor | None = None) -> Any:
        return picked(*add_rms_norm(x, delta, weight, EPS, backend=backend))

    def defined(x: Tensor, weight: Tensor, delta: Tensor | float = 0.0) -> Any:
        total = x + delta
        return picked(total, total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight)

    shapes = (shape, shape[-1:], *([shape] if residual else []))
    return Operation(
        "add_rms_norm",
        lambda: [normal(*size, seed=seed) for seed, size in enumerate(shapes)],
        run,
        defined,
        ("add_rms_norm_kernel", "rms_norm_backward_kernel", "sum_parts_kernel"),
        f"{shape}-{outputs}" + "-first" * (not residual),
    )


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

    def angles(self, size: int) -> tuple[Tensor, Tensor]:
        """cos and sin by token, float32 [T, 1, size / 2]; positions restart with each document."""
        position = torch.tensor([float(t) for n in self.lengths for t in range(n)])
        angle = position[:, None] * torch.arange(1, size // 2 + 1) / size
        return angle.cos()[:, None], angle.sin()[:, None]

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.lengths))}-l{self.l}d{self.d}b{self.batch}"


DOCUMENTS = [
    Documents((11,), batch=2),
    Documents((9, 0, 1, 8), l=5, d=3),
    Documents((3,), l=4, d=2),  # no block
    Documents((8,), l=4, d=4),  # blocks that do not overlap
    Documents((7, 2), l=3, d=1),
]
SIZES = {"heads": 4, "kv_heads": 2, "key_dim": 6, "value_dim": 5}
# Every layout that a model uses: kinds of attention, branch subsets, compressors and decoding.
LAYOUTS = {
    "all branches": PackedLayout(**SIZES, kv_sets=3, gates=3, first_set=1, mean=True),
    "cmp": PackedLayout(**SIZES, kv_sets=1, gates=1, first_set=1, mean=True),
    "sel+win": PackedLayout(**SIZES, kv_sets=2, gates=2, mean=True),
    "win": PackedLayout(**SIZES, kv_sets=1, gates=1),
    "dense": PackedLayout(**SIZES, kv_sets=1),
    "mlp": PackedLayout(**SIZES, kv_sets=3, gates=3, first_set=1, pre_rope=True),
    "prefill": PackedLayout(**SIZES, kv_sets=3, gates=3, mean=True),
    "decoding with mlp": PackedLayout(**SIZES, kv_sets=2, gates=2, pre_rope=True),
    "index": PackedLayout(**SIZES, kv_sets=1, indexed=True),
    "keys that rank blocks": PackedLayout(0, 2, 6, 0, 1, first_set=1, mean=True),
    "one head": PackedLayout(1, 1, 2, 1, kv_sets=3, gates=3, first_set=1, mean=True),
}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of one head: x [.., D], angles [.., D / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotary(layout: PackedLayout, documents: Documents) -> Operation:
    """A projection; columns of padding up to a multiple of 8 must have no effect."""

    def run(backend: str, packed: Tensor) -> tuple[Tensor, ...]:
        """All outputs that the layout has."""
        tables = (*documents.angles(layout.key_dim), *documents.tables())
        laid_out = (with_gaps(x.to(packed.device)) for x in tables)
        parts = rotary_pool(packed, layout, *laid_out, backend=backend)
        outputs = [parts.q] + ([] if parts.gates is None else [parts.gates])
        outputs += parts.compressed or ()
        outputs += (x for pair in parts.kv_sets[layout.first_set : layout.kv_sets] for x in pair)
        return *outputs, *(parts.indexed or ())

    def defined(packed: Tensor) -> tuple[Tensor, ...]:
        """Head by head and block by block."""
        angles = tuple(x[:, 0] for x in documents.angles(layout.key_dim))
        column = 0

        def heads(count: int, size: int) -> list[Tensor]:
            nonlocal column
            first, column = column, column + count * size
            return [packed[..., first + i * size : first + (i + 1) * size] for i in range(count)]

        q = heads(layout.heads, layout.key_dim)
        k = [heads(layout.kv_heads, layout.key_dim) for _ in range(layout.kv_sets)]
        v = [heads(layout.kv_heads, layout.value_dim) for _ in range(layout.kv_sets)]
        index_q, index_k = (heads(layout.indexed * layout.kv_heads, layout.key_dim) for _ in "qk")
        gates = heads(layout.heads, layout.gates)
        none = packed.new_empty(*packed.shape[:2], layout.key_dim)
        outputs = [[rotated(x, *angles) for x in q] or [none]]
        outputs += [[x.sigmoid() for x in gates]] if layout.gates else []
        if layout.mean:
            for kind in ([rotated(x, *angles) for x in k[0]], v[0]):
                outputs += [[means(x) for x in kind]]
        outputs += [k[0], v[0]] if layout.pre_rope else []
        for number in range(layout.first_set, layout.kv_sets):
            outputs += [[rotated(x, *angles) for x in k[number]], v[number]]
        if layout.indexed:
            outputs += [[rotated(x, *angles) for x in index_q], index_k]
        stacked = tuple(torch.stack(x, 2) for x in outputs)
        return stacked if layout.heads else (stacked[0][:, :, :0], *stacked[1:])

    def means(x: Tensor) -> Tensor:
        blocks = documents.blocks()
        return torch.stack([x[:, block].mean(1) for block in blocks], 1) if blocks else x[:, :0]

    width = -(-sum(layout.columns) // 8) * 8
    pools = bool(layout.mean and documents.blocks())
    return Operation(
        "rotary_pool",
        lambda: [normal(documents.batch, documents.tokens, width, seed=documents.tokens)],
        run,
        defined,
        # Without a block nothing is pooled: a launch of an empty grid is an error on a GPU.
        ("rotary_kernel", *["pool_kernel"] * pools, "rotary_backward_kernel"),
        f"{layout.kv_sets}{layout.gates}{layout.mean}-{documents}",
    )


def pool(documents: Documents, heads: int, size: int, rotates: bool) -> Operation:
    """x, weight, position and scale; scores differ much between tokens and between channels."""

    def inputs() -> list[Tensor]:
        seed = documents.tokens
        return [
            normal(documents.batch, documents.tokens, heads, size, seed=seed),
            normal(heads, size, size, seed=seed + 1, std=2 * size**-0.5),
            normal(heads, documents.l, size, seed=seed + 2),
            1 + normal(heads * size, seed=seed + 3, std=0.3),
        ]

    def angles() -> tuple[Tensor, Tensor]:
        """cos and sin at the last position of each block."""
        last = [block[-1] for block in documents.blocks()]
        cos, sin = documents.angles(size)
        return cos[last], sin[last]

    def run(backend: str, x: Tensor, *parameters: Tensor) -> Tensor:
        cos, sin = (with_gaps(y.to(x.device)) for y in angles())
        tables = (with_gaps(y.to(x.device)) for y in documents.tables())
        return ops_pool(x, *parameters, (cos, sin) if rotates else None, *tables, backend=backend)

    def defined(x: Tensor, weight: Tensor, position: Tensor, scale: Tensor) -> Tensor:
        """Block by block, head by head."""
        columns = zip(x.unbind(2), weight, position, scale.view(heads, size), strict=True)
        return torch.stack([one_head(*column) for column in columns], 2)

    def one_head(x: Tensor, weight: Tensor, position: Tensor, scale: Tensor) -> Tensor:
        outputs = []
        for number, block in enumerate(documents.blocks()):
            scores = torch.stack([x[:, t] @ weight + position[i] for i, t in enumerate(block)])
            weights = scores.exp() / scores.exp().sum(0)
            y = sum(weights[i] * x[:, t] for i, t in enumerate(block)) * scale
            at_last = (table[number, 0].to(x) for table in angles())
            outputs.append(rotated(y, *at_last) if rotates else y)
        if outputs:
            return torch.stack(outputs, 1)
        return x[:, :0] * (weight.sum() + position.sum() + scale.sum())  # gradients of zeros

    return Operation(
        "pool",
        inputs,
        run,
        defined,
        ("pool_forward_kernel", "pool_backward_kernel", "sum_parts_kernel"),
        f"{documents}-h{heads}d{size}" + "-keys" * rotates,
    )


PATTERNS = {
    "recipe's blocks": Case(
        NSASpec(32, 16, 64, 4, 1, 2, 64), (330,), kv_heads=1, group=3, key_dim=16
    ),
    "packed": Case(NSASpec(8, 4, 8, 4, 1, 1, 16), (5, 0, 46, 1, 33), group=3),
    "batch": Case(NSASpec(8, 4, 16, 4, 1, 1, 16), (70,), batch=2, kv_heads=1, group=6),
    "odd sizes": Case(NSASpec(9, 7, 5, 4, 0, 1, 5), (80, 40), kv_heads=1, group=4, key_dim=6),
    "large blocks": Case(NSASpec(4, 2, 70, 2, 0, 1, 5), (200,), kv_heads=1, group=1),
    "a key per token": Case(NSASpec(1, 1, 6, 4, 1, 1, 5), (40, 0, 23), kv_heads=1, group=3),
    "no compressed block": Case(NSASpec(30, 3, 2, 4, 0, 1, 5), (29,), kv_heads=1),
    "some queries without": Case(NSASpec(30, 3, 2, 4, 0, 1, 5), (60, 29, 40), kv_heads=1),
    "several tiles of documents": Case(
        NSASpec(4, 2, 4, 4, 0, 1, 5), (1,) * 70 + (28,), kv_heads=1, group=1
    ),
    "nothing ranked": Case(NSASpec(8, 4, 16, 4, 1, 2, 16), (31,)),
}
RANDOM = [case for case in random_cases(60, longest=90, seed=5) if case.seq_len > 20]


def sampled(case: Case) -> Tensor:
    """Every third token, so that tiles of queries are partial and span documents; a view."""
    return torch.arange(case.seq_len)[case.seq_len % 3 :: 3]


def selector(case: Case, heads: int = 0, queries: Sequence[int] | None = None) -> Operation:
    """Compressed keys, q and selected keys, of which the first alone are learned.

    With `heads` per KV head, other queries than q rank blocks, and they are learned too. Outputs
    are the loss and its target.
    """
    tokens = sampled(case) if queries is None else torch.tensor(queries)

    def inputs() -> list[Tensor]:
        x, (batch, length) = Inputs.of(case), (case.batch, case.seq_len)
        own = [normal(batch, length, case.kv_heads * heads, case.key_dim, seed=heads)]
        return [x.k_cmp, x.q, x.k_sel, *(own if heads else [])]

    def run(backend: str, k: Tensor, q: Tensor, k_sel: Tensor, own: Tensor | None = None) -> Any:
        options: Any = {"cu_seqlens": case.offsets_on(q.device), "backend": backend}
        return selector_loss(q, k, k_sel, tokens.to(q.device), case.spec, q_cmp=own, **options)

    def defined(k_cmp: Tensor, q: Tensor, k_sel: Tensor, own: Tensor | None = None) -> Any:
        """From dense scores of one document and query at a time."""
        spec, groups = case.spec, k_sel.shape[2]
        blocks = torch.arange(spec.select_blocks_len(case.seq_len))
        total, targets = q.new_zeros(()), []
        pieces = [
            document_slices(case.seq_len, case.cu_seqlens),
            compressed_slices(case.seq_len, case.cu_seqlens, spec),
        ]
        for t in tokens.tolist():
            doc, keys = next((d, k) for d, k in zip(*pieces, strict=True) if d.start <= t < d.stop)
            at, last = t - doc.start, (t - doc.start) // spec.select_len - spec.local_blocks
            query = q[:, t].detach().unflatten(1, (groups, -1))  # [B, K, G, D]
            ranking = query if own is None else own[:, t].unflatten(1, (groups, -1))
            seen = spec.visible_compressed(at)
            inside = torch.arange(seen)[:, None] * spec.block_stride + torch.arange(spec.block_len)
            masses = [
                attention(query, k_sel[:, doc.start : t + 1].detach())
                @ one_hot(torch.arange(at + 1)),
                attention(ranking, k_cmp[:, keys][:, :seen]) @ one_hot(inside).mean(1),
            ]
            ranked = (blocks >= spec.init_blocks) & (blocks <= last)
            target, p = (mass.mean(2) * ranked for mass in masses)  # [B, K, M]
            log_target, log_p = (
                x.clamp(min=TINY).log() - x.sum(-1, keepdim=True).clamp(min=TINY).log()
                for x in (target, p)
            )
            total = total + (target * (log_target - log_p)).sum()
            targets.append(target)
        return total / (q.shape[0] * groups * len(tokens)), torch.stack(targets, 2)

    def attention(query: Tensor, k: Tensor) -> Tensor:
        """Softmax over keys [B, n, K, D] of queries [B, K, G, D]: [B, K, G, n]."""
        return (case.scale * torch.einsum("bkgd,bnkd->bkgn", query, k)).softmax(-1)

    def one_hot(position: Tensor) -> Tensor:
        """The selection block of positions [..]: [.., M]."""
        blocks = torch.arange(case.spec.select_blocks_len(case.seq_len))
        return (position[..., None] // case.spec.select_len == blocks).double()

    return Operation(
        "selector_loss",
        inputs,
        run,
        defined,
        ("mass_kernel", "mass_kernel", "divergence_kernel", "keys_kernel")
        + ("queries_kernel",) * (heads > 0),
        f"{case}-own{heads}",
    )
