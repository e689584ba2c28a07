"""Kernel launches of every operation, recorded on the `meta` device.

The library's own launchers run under `recording()`, once per candidate config, so what is compiled
and checked is what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from nsa.bench.options import SHAPES
from nsa.dtypes import DTYPES
from nsa.ops.inputs import PackedLayout, RotaryPoolInputs, SelectionInputs
from nsa.ops.triton.activation import PackedGates, swiglu_backward, swiglu_forward
from nsa.ops.triton.band_op import Band, band_backward, band_forward
from nsa.ops.triton.configs import Choice, choosing_for, override_choices
from nsa.ops.triton.cross_entropy import cross_entropy_
from nsa.ops.triton.decode import DecodeInputs, decode_forward
from nsa.ops.triton.embedding import add_token_gradients_
from nsa.ops.triton.gated import Gated, gated_backward, gated_forward
from nsa.ops.triton.launch import Launch, recording
from nsa.ops.triton.normalization import (
    AddNorm,
    Norm,
    add_rms_norm_backward,
    add_rms_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from nsa.ops.triton.rotary import rotary_pool_backward, rotary_pool_forward
from nsa.ops.triton.select import select_forward
from nsa.ops.triton.selected_op import Selected, selected_backward, selected_forward
from nsa.spec import NSASpec

MAX_CANDIDATES = 4  # per operation, as nsa.ops.triton.configs promises
PAPER, SCALE, DOCUMENTS = NSASpec(), 0.125, 5


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

    def tensors(self, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v and cu_seqlens on the `meta` device."""
        q, k, v = (
            torch.empty(1, length, heads, size, dtype=DTYPES[self.dtype], device="meta")
            for length, heads, size in (
                (self.seq_len, self.heads, self.key),
                (keys, self.kv_heads, self.key),
                (keys, self.kv_heads, self.value),
            )
        )
        cu_seqlens = torch.empty(DOCUMENTS + 1, dtype=torch.int32, device="meta")
        return q, k, v, cu_seqlens if self.packed else None

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


def _compressed(case: Case) -> None:
    keys = case.spec.compressed_len(case.seq_len)
    _band(case, keys, [case.spec.block_len, case.spec.block_stride, 0])


def _window(case: Case) -> None:
    _band(case, case.seq_len, [1, 1, case.spec.window])


def _band(case: Case, keys: int, band: list[int]) -> None:
    q, k, v, cu_seqlens = case.tensors(keys)
    x = Band(q, k, v, cu_seqlens, band, SCALE)
    o, lse = band_forward(x)
    band_backward(o, lse, x, o, lse)


def _select(case: Case) -> None:
    q, k, _, cu_seqlens = case.tensors(case.spec.compressed_len(case.seq_len))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    select_forward(SelectionInputs(q, k, lse, cu_seqlens, case.spec, case.seq_len, SCALE))


def _selected(case: Case) -> None:
    q, k, v, cu_seqlens = case.tensors(case.seq_len)
    index = k.new_empty(*k.shape[:3], case.spec.select_top, dtype=torch.int32)
    x = Selected(q, k, v, index, cu_seqlens, case.spec, SCALE)
    o, lse = selected_forward(x)
    selected_backward(o, x, o, lse)


def _gated(case: Case) -> None:
    q, k, v, cu_seqlens = case.tensors(case.seq_len)
    _, k_cmp, v_cmp, _ = case.tensors(case.spec.compressed_len(case.seq_len))
    gates = q.new_empty(*q.shape[:3], 3)
    x = Gated(q, k_cmp, v_cmp, k, v, k, v, gates, cu_seqlens, case.spec, SCALE)
    o, *saved = gated_forward(x)
    gated_backward(o, x, *saved)


def _decode(case: Case) -> None:
    """One token, with caches of capacity `seq_len`; documents are not packed."""
    q, k, v, _ = case.tensors(case.seq_len)
    _, k_cmp, v_cmp, _ = case.tensors(case.spec.compressed_len(case.seq_len))
    window, branches = slice(case.spec.window), "cmp+sel+win"
    pairs = k_cmp, v_cmp, k, v, k[:, window], v[:, window]
    gates = q.new_empty(1, case.heads, 3)
    lengths = torch.empty(1, dtype=torch.int64, device="meta")
    decode_forward(DecodeInputs(q[:, -1], *pairs, gates, lengths, case.spec, branches, SCALE))


def _swiglu(case: Case) -> None:
    """Hidden layers of M7C's proportion: 2,368 for 64 columns a head."""
    packed = torch.empty(case.seq_len, 74 * case.key, dtype=DTYPES[case.dtype], device="meta")
    x = PackedGates(packed, 37 * case.key)
    swiglu_backward(swiglu_forward(x), x)


def _rotary_pool(case: Case) -> None:
    """All branches; shared keys of an mlp φ; and dense attention."""
    sizes, length = (case.heads, case.kv_heads, case.key, case.value), case.spec.block_len
    tokens, covering = case.seq_len, -(-length // case.spec.block_stride)
    for layout in (
        PackedLayout(*sizes, copies=3, gates=3, first_copy=1, mean=True),
        PackedLayout(*sizes, copies=1, gates=3, pre_rope=True),
        PackedLayout(*sizes, copies=1),
    ):
        width = -(-sum(layout.columns) // 8) * 8
        packed = torch.empty(1, tokens, width, dtype=DTYPES[case.dtype], device="meta")
        cos, sin = packed.new_empty(2, tokens, 1, case.key // 2, dtype=torch.float32)
        blocks = packed.new_empty(case.spec.compressed_len(tokens), length, dtype=torch.int64)
        covers = packed.new_empty(tokens, covering, dtype=torch.int64)
        x = RotaryPoolInputs(packed, cos, sin, blocks, covers, list(layout))
        outputs = rotary_pool_forward(x)
        rotary_pool_backward(*outputs, x, outputs[1])


def _cross_entropy(case: Case) -> None:
    """M7C's vocabulary, or with packed documents GPT-2's, which 16 does not divide."""
    vocabulary = 50_257 if case.packed else 50_304
    logits = torch.empty(case.seq_len, vocabulary, dtype=DTYPES[case.dtype], device="meta")
    labels = torch.empty(case.seq_len, dtype=torch.int64, device="meta")
    for with_gradients in (False, True):
        cross_entropy_(logits, labels, with_gradients)


def _tied_embedding(case: Case) -> None:
    """M7C's vocabulary, at each case's width."""
    dtype, width = DTYPES[case.dtype], case.heads * case.key
    d_x = torch.empty(case.seq_len, width, dtype=dtype, device="meta")
    tokens = torch.empty(case.seq_len, dtype=torch.int64, device="meta")
    add_token_gradients_(d_x.new_empty(50_304, width), d_x, tokens)


def _add_rms_norm(case: Case) -> None:
    """With and without a residual, and with and without its gradient."""
    dtype, width = DTYPES[case.dtype], case.heads * case.key
    x = torch.empty(case.seq_len, width, dtype=dtype, device="meta")
    weight = torch.empty(width, dtype=dtype, device="meta")
    rms_norm_backward(rms_norm_forward(Norm(x, weight, 1e-5)), Norm(x, weight, 1e-5))
    inputs = AddNorm(x, x, weight, 1e-5)
    total, normed = add_rms_norm_forward(inputs)
    add_rms_norm_backward(total, normed, inputs, total)


# Every public operation, forward and backward.
OPERATIONS: dict[str, Callable[[Case], None]] = {
    "compressed_attention": _compressed,
    "select_blocks": _select,
    "selected_attention": _selected,
    "window_attention": _window,
    "nsa_attention": _gated,
    "decode_attention": _decode,
    "swiglu": _swiglu,
    "rotary_pool": _rotary_pool,
    "cross_entropy": _cross_entropy,
    "add_rms_norm": _add_rms_norm,
    "tied_embedding": _tied_embedding,
}
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
# Triton specialises for a length of 1, lengths that 16 does not divide, 64-bit strides, and other
# blocks: here a pattern without overlapping blocks.
PAGED = NSASpec(block_len=64, block_stride=64, select_len=64)
SPECIAL = [
    ((12, 2, 64, 64, 1), PAPER),
    ((12, 2, 64, 64, 2047), PAPER),
    ((64, 4, 128, 128, 2**19), PAPER),
    ((12, 2, 64, 64, SHORT), PAGED),
    ((64, 4, 128, 128, LONG), PAGED),
]
# The GPU benchmarks; beyond 8k tokens nothing more is compiled.
BENCHMARKS = [
    ((shape.heads, shape.kv_heads, shape.key, shape.value, length), spec)
    for shape in SHAPES.values()
    for length in (1024, 2048, 4096, 8192)
    for spec in (PAPER, PAGED)
]


def cases(full: bool, operations: Iterable[str], benchmarks: bool = False) -> list[Case]:
    """Two representative shapes; with `full` all of them, with `benchmarks` the benchmarks'."""
    wanted = [(shape, "bf16", PAPER) for shape in SUBSET]
    if full:
        wanted = [(shape, dtype, PAPER) for shape in FULL for dtype in DTYPES]
        wanted += [(shape, "bf16", spec) for shape, spec in SPECIAL]
    elif benchmarks:
        wanted = [(shape, "bf16", spec) for shape, spec in BENCHMARKS]
    return [
        Case(operation, *shape, dtype, packed, spec)
        for operation in operations
        for shape, dtype, spec in wanted
        for packed in ((False,) if benchmarks else (False, True))
    ]


def record(case: Case, candidates: int = MAX_CANDIDATES, chip: str = "sm_80") -> list[Launch]:
    """Every launch of a call on a chip, for each of the first `candidates` configs."""
    launches: list[Launch] = []
    for number in range(candidates):
        with choosing_for(chip), override_choices(_candidate(number)), recording() as recorded:
            OPERATIONS[case.operation](case)
        launches += recorded
    return launches


def _candidate(number: int) -> Choice:
    return lambda _, options: options[min(number, len(options) - 1)]


def all_launches(
    chips: Sequence[str],
    operations: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    full: bool = False,
    benchmarks: bool = False,
) -> Iterator[tuple[Case, Launch, str]]:
    """Every launch that the flags of `python -m nsa.bench aot` name."""
    check_names("operation", operations, OPERATIONS)
    check_names("dtype", dtypes, DTYPES)
    candidates = MAX_CANDIDATES if full or benchmarks else 1
    return (
        (case, launch, chip)
        for case in cases(full, operations or OPERATIONS, benchmarks)
        if not dtypes or case.dtype in dtypes
        for chip in chips
        for launch in record(case, candidates, chip)
    )


def check_names(flag: str, names: Sequence[str], all_names: Collection[str]) -> Sequence[str]:
    """Return `names`; raise for one that does not exist."""
    if unknown := [name for name in names if name not in all_names]:
        raise ValueError(f"--{flag} {', '.join(unknown)}: choose from {', '.join(all_names)}")
    return names
