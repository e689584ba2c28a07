"""Kernel launches of every operation, recorded on the `meta` device.

The library's own functions and launchers run under `recording()`, once per candidate config, so
what is compiled and checked is what runs on a GPU.
"""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import ops
from nsa.dtypes import DTYPES
from nsa.model import AttentionConfig, ModelConfig, kernel_check
from nsa.model.config import IMPORTED, INDEXED
from nsa.ops import decode, pooling
from nsa.ops.custom_op import IMPLEMENTATIONS
from nsa.ops.inputs import DecodeInputs
from nsa.ops.per_token import cross_entropy_
from nsa.ops.triton import pool_limit
from nsa.ops.triton.configs import MAX_CANDIDATES
from nsa.spec import NSASpec
from tests.bench.module import candidate
from tests.bench.train import KINDS
from tests.kernel_launches import Launch, recording
from tests.operations import record_operations
from tests.ops import m7c_kernels
from tests.ops.tiles import choosing_for, override_choices

PAPER, DOCUMENTS = NSASpec(), 5


@dataclass(frozen=True)
class Case:
    """One call of one operation."""

    operation: str
    heads: int
    kv_heads: int
    key: int
    value: int
    seq_len: int
    dtype: str
    packed: bool
    spec: NSASpec = PAPER

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a `meta` tensor; without `dtype`, of the case's dtype and with a gradient."""
        used = dtype or DTYPES[self.dtype]
        return torch.empty(shape, dtype=used, device="meta", requires_grad=dtype is None)

    @property
    def q(self) -> Tensor:
        return self.empty(1, self.seq_len, self.heads, self.key)

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values of every position."""
        return self._pair(self.seq_len)

    @property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the compressed blocks."""
        return self._pair(self.spec.compressed_len(self.seq_len))

    def _pair(self, length: int) -> tuple[Tensor, Tensor]:
        k, v = (self.empty(1, length, self.kv_heads, size) for size in (self.key, self.value))
        return k, v

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every call: packed documents and backend."""
        cu_seqlens = self.empty(DOCUMENTS + 1, dtype=torch.int32) if self.packed else None
        return {"cu_seqlens": cu_seqlens, "backend": "triton"}

    @property
    def pattern(self) -> str:
        """The spec's numbers, in one word."""
        return "-".join(str(number) for number in astuple(self.spec))

    def __str__(self) -> str:
        sizes = f"{self.key}" if self.key == self.value else f"{self.key}/{self.value}"
        words = [self.operation, f"{self.heads}/{self.kv_heads} heads", sizes, self.dtype]
        words += [f"T={self.seq_len}", *["packed"] * self.packed]
        words += [self.pattern] if self.spec != PAPER else []
        return " ".join(words)


class Launchers(TorchDispatchMode):
    """Runs the launchers of custom ops; PyTorch would run their fake kernels on `meta` tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return IMPLEMENTATIONS.get(func._schema.name, func)(*args, **(kwargs or {}))


def launch_both_passes(call: Callable[[], Tensor | Iterable[Tensor]]) -> None:
    """Run the launchers of a call on `meta` tensors, of which reading a value raises."""
    with Launchers():
        results = call()
        results = [results] if isinstance(results, Tensor) else results
        outputs = [x for x in results if x.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])


OPERATIONS: dict[str, Callable[[Case], None]] = {}  # every public operation


def _operation(call: Callable[[Case], Iterable[Tensor]]) -> Callable[[Case], None]:
    """Add the call to OPERATIONS, as a function that runs its launchers forward and backward."""
    return OPERATIONS.setdefault(call.__name__, lambda case: launch_both_passes(lambda: call(case)))


@_operation
def compressed_attention(case: Case) -> Iterable[Tensor]:
    return ops.compressed_attention(case.q, *case.blocks, case.spec, **case.options)


@_operation
def select_blocks(case: Case) -> Iterable[Tensor]:
    """By the attention's own queries, and by index queries, which need no lse."""
    lse = case.empty(1, case.seq_len, case.heads, dtype=torch.float32)
    for q, normalizer in ((case.q, lse), (case.q[:, :, : case.kv_heads], None)):
        yield ops.select_blocks(q, case.blocks[0], normalizer, case.spec, **case.options)


@_operation
def selector_loss(case: Case) -> Iterable[Tensor]:
    """Blocks ranked by the attention's own queries, and by index queries."""
    queries = case.empty(32, dtype=torch.int64)
    keys = case.blocks[0], case.tokens[0]
    for index in (None, case.q[:, :, : case.kv_heads]):
        options = case.options | {"q_cmp": index}
        yield ops.selector_loss(case.q, *keys, queries, case.spec, **options)[0]


@_operation
def selected_attention(case: Case) -> Iterable[Tensor]:
    top = case.spec.select_top
    index = case.empty(1, case.seq_len, case.kv_heads, top, dtype=torch.int32)
    return [ops.selected_attention(case.q, *case.tokens, index, case.spec, **case.options)]


@_operation
def window_attention(case: Case) -> Iterable[Tensor]:
    return [ops.window_attention(case.q, *case.tokens, case.spec.window, **case.options)]


@_operation
def nsa_attention(case: Case) -> Iterable[Tensor]:
    gates = case.empty(1, case.seq_len, case.heads, 3)
    pairs = *case.blocks, *case.tokens, *case.tokens
    return [ops.nsa_attention(case.q, *pairs, gates, case.spec, **case.options)]


@_operation
@torch.no_grad()
def decode_attention(case: Case) -> Iterable[Tensor]:
    """One token, with caches of capacity `seq_len`: three branches, and blocks by index queries."""
    k_win, v_win = (x[:, : case.spec.window] for x in case.tokens)
    gates, lengths = case.empty(1, case.heads, 3), case.empty(1, dtype=torch.int64)
    pairs = *case.blocks, *case.tokens, k_win, v_win
    q, (k_cmp, _), scale = case.q[:, -1], case.blocks, case.q.shape[-1] ** -0.5
    every = DecodeInputs(q, None, *pairs, gates, lengths, case.spec, "cmp+sel+win", scale)
    index = q[:, : case.kv_heads], k_cmp, None
    sel = *case.tokens, None, None, None, lengths, case.spec, "sel", scale
    yield decode.decode_attention(every, "triton")
    yield decode.decode_attention(DecodeInputs(q, *index, *sel), "triton")


@_operation
def swiglu(case: Case) -> Iterable[Tensor]:
    """Gate and up in M7C's proportion: 2 × 2,368 columns for heads of 64."""
    return [ops.swiglu(case.empty(case.seq_len, 74 * case.key), backend="triton")]


@_operation
def rotary_pool(case: Case) -> Iterable[Tensor]:
    """All branches; one set of keys, with an mlp φ; dense attention; an index."""
    sizes, length = (case.heads, case.kv_heads, case.key, case.value), case.spec.block_len
    tokens, covering = case.seq_len, -(-length // case.spec.block_stride)
    cos, sin = case.empty(2, tokens, 1, case.key // 2, dtype=torch.float32)
    blocks = case.empty(case.spec.compressed_len(tokens), length, dtype=torch.int64)
    covers = case.empty(tokens, covering, dtype=torch.int64)
    for layout in (
        ops.PackedLayout(*sizes, kv_sets=3, gates=3, first_set=1, mean=True),
        ops.PackedLayout(*sizes, kv_sets=1, gates=3, pre_rope=True),
        ops.PackedLayout(*sizes, kv_sets=1),
        ops.PackedLayout(*sizes, kv_sets=1, indexed=True),
    ):
        packed = case.empty(1, tokens, -(-sum(layout.columns) // 8) * 8)
        yield ops.rotary_pool(packed, layout, cos, sin, blocks, covers, backend="triton").q


@_operation
def pool(case: Case) -> Iterable[Tensor]:
    """Keys, which are rotated, and values; only of the sizes that a program can hold."""
    length, tokens = case.spec.block_len, case.seq_len
    blocks = case.empty(case.spec.compressed_len(tokens), length, dtype=torch.int64)
    covers = case.empty(tokens, -(-length // case.spec.block_stride), dtype=torch.int64)
    rotary = case.empty(2, len(blocks), 1, case.key // 2, dtype=torch.float32)
    for x, angles in zip(case.tokens, ((rotary[0], rotary[1]), None), strict=True):
        heads, size = x.shape[2:]
        if pool_limit(length, size) is None:
            parameters = ((heads, size, size), (heads, length, size), (heads * size,))
            weight, position, scale = (case.empty(*shape) for shape in parameters)
            tables = angles, blocks, covers
            yield pooling.pool(x, weight, position, scale, *tables, backend="triton")


@_operation
def cross_entropy(case: Case) -> Iterable[Tensor]:
    """M7C's vocabulary, or with packed documents GPT-2's, which 16 does not divide."""
    logits = case.empty(case.seq_len, 50_257 if case.packed else 50_304).detach()
    labels = case.empty(case.seq_len, dtype=torch.int64)
    for with_gradients in (False, True):
        yield cross_entropy_(logits, labels, with_gradients, backend="triton")


@_operation
def add_rms_norm(case: Case) -> Iterable[Tensor]:
    """With and without a residual."""
    x, delta = (case.empty(case.seq_len, case.heads * case.key) for _ in range(2))
    weight = case.empty(x.shape[1])
    yield ops.add_rms_norm(x, None, weight, 1e-5, backend="triton")[1]
    yield from ops.add_rms_norm(x, delta, weight, 1e-5, backend="triton")


# Heads, key/value heads, key size, value size, positions. SHORT: a tile of queries selects most
# blocks and one program sums a key's gradient. LONG: neither.
SHORT, LONG = 2048, 65_536
SUBSET = [(12, 2, 64, 64, SHORT), (64, 4, 128, 128, LONG)]
FULL = [
    (*heads, *sizes, length)
    for heads, all_sizes in (
        ((12, 2), [(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]),
        ((4, 4), [(64, 64)]),
        ((64, 4), [(128, 128), (192, 128)]),
    )
    for sizes in all_sizes
    for length in (SHORT, LONG)
]
# Triton compiles separately for a length of 1, lengths that 16 does not divide, 64-bit strides and
# other blocks: here blocks that do not overlap.
DISJOINT = NSASpec(block_len=64, block_stride=64, select_len=64)
SPECIAL = [
    ((12, 2, 64, 64, 1), PAPER),
    ((12, 2, 64, 64, 2047), PAPER),
    ((64, 4, 128, 128, 2**19), PAPER),
    ((12, 2, 64, 64, SHORT), DISJOINT),
    ((64, 4, 128, 128, LONG), DISJOINT),
]
# The GPU benchmarks; beyond 8k tokens nothing more is compiled.
BENCHMARKS = [
    ((*heads, length), spec)
    for heads in ((12, 2, 64, 64), (64, 4, 128, 128))
    for length in (SHORT, 8192)
    for spec in (PAPER, DISJOINT, INDEXED, IMPORTED)
]
PARTS = ("compressed_attention", "select_blocks", "selected_attention", "window_attention",
         "nsa_attention")  # fmt: skip


def cases(kind: str, operations: Iterable[str]) -> list[Case]:
    """Return the cases of a flag of `python -m tests.bench aot`; `first`: of two shapes."""
    wanted = [(shape, "bf16", PAPER) for shape in SUBSET]
    if kind == "full":
        wanted = [(shape, dtype, PAPER) for shape in FULL for dtype in DTYPES]
        wanted += [(shape, "bf16", spec) for shape, spec in SPECIAL]
    elif kind == "benchmarks":
        wanted = [(shape, "bf16", spec) for shape, spec in BENCHMARKS]
    elif kind == "tiles":
        wanted = [(shape, "bf16", spec) for shape, spec in BENCHMARKS if spec == PAPER]
        operations = [name for name in operations if name in PARTS]
    return [
        Case(operation, *shape, dtype, packed, spec)
        for operation in operations
        for shape, dtype, spec in wanted
        for packed in ((False,) if kind in ("benchmarks", "tiles") else (False, True))
    ]


def record_launches(
    case: Case, candidates: int = MAX_CANDIDATES, chip: str = "sm_80"
) -> list[Launch]:
    """Return every launch of a call on a chip, for each of the first `candidates` configs."""
    launches: list[Launch] = []
    for number in range(candidates):
        choice = partial(candidate, number)
        with choosing_for(chip), override_choices(choice), recording() as recorded:
            OPERATIONS[case.operation](case)
        launches += recorded
    return launches


def benchmark_launches(chip: str) -> list[tuple[Case, Launch]]:
    """Return the launches of the models' training steps and of the kernel check on a chip."""
    recorded = list[tuple[Case, Launch]]()
    for attention in (*KINDS.values(), AttentionConfig(compressor="pool", selector_loss=1.0)):
        for length in (SHORT, 8_192, 32_768):
            config = ModelConfig(layers=1, attention=attention)
            case = Case("training step", 12, 2, 64, 64, length, "bf16", False, attention.spec)
            with choosing_for(chip):
                operations = record_operations(config, LONG // length, length)
            recorded += [(case, x.launch) for y in operations for x in y.launches if x.launch]
    case = Case("kernel check", 12, 2, 64, 64, SHORT, "bf16", False)

    def only_launch(operation: kernel_check.Operation, dtype: torch.dtype) -> None:
        kernel_check._outputs(operation, dtype, "triton")

    with (
        mock.patch.object(kernel_check, "check", only_launch),
        mock.patch.object(ops.triton, "interpreted", return_value=True),  # allows CPU tensors
        choosing_for(chip),
        recording() as launches,  # nothing runs: what they return is garbage
    ):
        m7c_kernels.check_m7c(torch.device("cpu"))
    return recorded + [(case, launch) for launch in launches]
