"""`python -m nsa.bench aot`: compile every kernel that the library can launch, without a GPU.

The launchers are called with tensors on the `meta` device under `recording()`, once for each
candidate config, so what is compiled and checked here is what a GPU would be given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from datetime import datetime, timezone
from multiprocessing import get_context
from typing import Any

import torch
import triton
from torch import Tensor

from nsa.bench.compiled import CHIPS, Chip, Facts, Variant, compile_variant
from nsa.bench.shapes import SHAPES
from nsa.ops.triton.band_op import band_backward, band_forward
from nsa.ops.triton.configs import Choice, choosing
from nsa.ops.triton.decode import decode_forward
from nsa.ops.triton.gated import gated_backward, gated_forward
from nsa.ops.triton.launch import Launch, recording
from nsa.ops.triton.select import select_forward
from nsa.ops.triton.selected_op import selected_backward, selected_forward
from nsa.spec import NSASpec

# Bytes a thread may keep on its stack: 24 registers, such as pointers and bounds put aside around a
# loop, cost nothing that can be measured. Part of a tile that went there is a tile too large.
MOST_SPILLED = 96
# float32 is for checks, not for training: its products take three passes, and both parts of heads
# larger than 128 do not fit the registers with any tile.
MOST_SPILLED_WIDE = 320
MOST_CANDIDATES = 4  # what nsa.ops.triton.configs promises
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
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

    def __str__(self) -> str:
        sizes = f"{self.key}" if self.key == self.value else f"{self.key}/{self.value}"
        words = [self.operation, f"{self.heads}/{self.kv_heads} heads", sizes, self.dtype]
        words += [f"T={self.seq_len}", *["packed"] * self.packed]
        if self.spec != PAPER:
            words.append("-".join(str(number) for number in astuple(self.spec)))
        return " ".join(words)


def _compressed(case: Case) -> None:
    keys = case.spec.compressed_len(case.seq_len)
    _band(case, keys, [case.spec.block_len, case.spec.block_stride, 0])


def _window(case: Case) -> None:
    _band(case, case.seq_len, [1, 1, case.spec.window])


def _band(case: Case, keys: int, band: list[int]) -> None:
    q, k, v, cu_seqlens = case.tensors(keys)
    o, lse = band_forward(q, k, v, cu_seqlens, band, SCALE)
    band_backward(o, lse, q, k, v, o, lse, cu_seqlens, band, SCALE)


def _select(case: Case) -> None:
    q, k, _, cu_seqlens = case.tensors(case.spec.compressed_len(case.seq_len))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    select_forward(q, k, lse, cu_seqlens, case.spec, case.seq_len, SCALE)


def _selected(case: Case) -> None:
    q, k, v, cu_seqlens = case.tensors(case.seq_len)
    chosen = k.new_empty(*k.shape[:3], case.spec.select_top, dtype=torch.int32)
    o, lse = selected_forward(q, k, v, chosen, cu_seqlens, case.spec, SCALE)
    selected_backward(o, q, k, v, o, lse, chosen, cu_seqlens, case.spec, SCALE)


def _gated(case: Case) -> None:
    q, k, v, cu_seqlens = case.tensors(case.seq_len)
    _, k_cmp, v_cmp, _ = case.tensors(case.spec.compressed_len(case.seq_len))
    keys_values, gates = [k_cmp, v_cmp, k, v, k, v], q.new_empty(*q.shape[:3], 3)
    rest = cu_seqlens, case.spec, SCALE
    o, index, *branches = gated_forward(q, keys_values, gates, *rest)
    gated_backward(o, q, keys_values, gates, index, branches[::2], branches[1::2], *rest)


def _decode(case: Case) -> None:
    """One token behind buffers with room for so many; documents are not packed."""
    q, k, v, _ = case.tensors(case.seq_len)
    _, k_cmp, v_cmp, _ = case.tensors(case.spec.compressed_len(case.seq_len))
    window = slice(case.spec.window)
    pairs = {"cmp": (k_cmp, v_cmp), "sel": (k, v), "win": (k[:, window], v[:, window])}
    gates = q.new_empty(1, case.heads, len(pairs))
    lengths = torch.empty(1, dtype=torch.int64, device="meta")
    decode_forward(q[:, -1], pairs, gates, lengths, case.spec, list(pairs), SCALE)


# Every public operation, forward and backward, by what its launchers are given.
OPERATIONS: dict[str, Callable[[Case], None]] = {
    "compressed_attention": _compressed,
    "select_blocks": _select,
    "selected_attention": _selected,
    "window_attention": _window,
    "nsa_attention": _gated,
    "decode_attention": _decode,
}
# Heads, key/value heads, key size, value size, and positions: few, where a tile of queries chooses
# most blocks and one program adds up a key's gradient, or many. The model's own and a large one.
FEW, MANY = 2048, 65_536
SUBSET = [(12, 2, 64, 64, FEW), (64, 4, 128, 128, MANY)]
FULL = [
    (*heads, *sizes, length)
    for heads, all_sizes in (
        ((12, 2), [(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]),
        ((4, 4), [(64, 64)]),
        ((64, 4), [(128, 128), (192, 128)]),
    )
    for sizes in all_sizes
    for length in (FEW, MANY)
]
# Triton compiles anew for a length of 1, lengths that 16 does not divide, 64-bit strides, and
# other blocks: a paged pattern, which libraries without overlapping blocks need.
PAGED = NSASpec(block_len=64, block_stride=64, select_len=64)
ODD = [
    ((12, 2, 64, 64, 1), PAPER),
    ((12, 2, 64, 64, 2047), PAPER),
    ((64, 4, 128, 128, 2**19), PAPER),
    ((12, 2, 64, 64, FEW), PAGED),
    ((64, 4, 128, 128, MANY), PAGED),
]
# What the GPU benchmarks launch, at any of their lengths: from 8k on nothing is compiled anew.
BENCHMARKS = [
    ((shape.heads, shape.kv_heads, shape.key, shape.value, length), spec)
    for shape in SHAPES.values()
    for length in (1024, 2048, 4096, 8192)
    for spec in (PAPER, PAGED)
]


def cases(full: bool, operations: Sequence[str], benchmarks: bool = False) -> list[Case]:
    """The calls to compile for: the two shapes that matter most or, with `full`, all of them.

    With `benchmarks` those of the benchmarks instead.
    """
    wanted = [(shape, "bf16", PAPER) for shape in SUBSET]
    if full:
        wanted = [(shape, dtype, PAPER) for shape in FULL for dtype in DTYPES]
        wanted += [(shape, "bf16", spec) for shape, spec in ODD]
    elif benchmarks:
        wanted = [(shape, "bf16", spec) for shape, spec in BENCHMARKS]
    return [
        Case(operation, *shape, dtype, packed, spec)
        for operation in operations
        for shape, dtype, spec in wanted
        for packed in ((False,) if benchmarks else (False, True))
    ]


def record(case: Case, candidates: int = MOST_CANDIDATES) -> list[Launch]:
    """Every launch of a call, with the first so many candidates for its tile sizes."""
    launches: list[Launch] = []
    for turn in range(candidates):
        with choosing(_candidate(turn)), recording() as started:
            OPERATIONS[case.operation](case)
        launches += started
    return launches


def _candidate(turn: int) -> Choice:
    return lambda _, options: options[min(turn, len(options) - 1)]


def run(
    chips: Sequence[str],
    full: bool = False,
    operations: Sequence[str] = (),
    jobs: int = 1,
    benchmarks: bool = False,
    dtypes: Sequence[str] = (),
) -> dict[str, Any]:
    """Record, compile and check; prints a table. What is wrong is in the result's `failures`."""
    asked_for = ("arch", chips, CHIPS), ("operation", operations, OPERATIONS)
    for what, asked, known in (*asked_for, ("dtype", dtypes, DTYPES)):
        if unknown := [name for name in asked if name not in known]:
            raise ValueError(f"--{what} {', '.join(unknown)}: choose from {', '.join(known)}")
    launches = [
        (case, launch)
        for case in cases(full, operations or list(OPERATIONS), benchmarks)
        if not dtypes or case.dtype in dtypes
        for launch in record(case, MOST_CANDIDATES if full or benchmarks else 1)
    ]
    return check(launches, chips, jobs)


def check(
    launches: Iterable[tuple[Case, Launch]], chips: Sequence[str], jobs: int = 1
) -> dict[str, Any]:
    """Compile each launch for each chip, equal ones once, and say what breaks a limit."""
    assert not triton.knobs.runtime.interpret, "what the interpreter takes cannot be compiled"
    variants: dict[Variant, tuple[Case, Launch]] = {}
    for case, launch in launches:
        for chip in chips:
            variants.setdefault(Variant.of(launch, chip), (case, launch))
    print(_HEADER)
    rows, failures = [], []
    with _mapping(jobs) as over:
        compiled = zip(variants.items(), over(_attempt, variants), strict=True)
        for (variant, (case, launch)), facts in compiled:
            found = (
                [f"does not compile: {facts}"]
                if isinstance(facts, str)
                else _wrong(facts, CHIPS[variant.chip], case)
            )
            config = "/".join(str(number) for number in astuple(launch.config))
            print(_line(variant, case, config, facts, found), flush=True)
            failures += [f"{variant.kernel} {case} {config} {variant.chip}: {x}" for x in found]
            figures = {} if isinstance(facts, str) else asdict(facts)
            names = {"kernel": variant.kernel, "chip": variant.chip, "config": config}
            rows.append({**names, **asdict(case), **figures, "wrong": found})
    print(f"{len(rows)} compiled, {len(failures)} failures", *failures, sep="\n")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m nsa.bench", *sys.argv[1:]]),
        "triton": triton.__version__,
        "failures": failures,
        "rows": rows,
    }


def _wrong(facts: Facts, chip: Chip, case: Case) -> list[str]:
    found = []
    wide = case.dtype == "fp32" and max(case.key, case.value) > 128
    most_spilled = MOST_SPILLED_WIDE if wide else MOST_SPILLED
    for what, figure, limit in (
        ("bytes of shared memory a block", facts.shared, chip.shared),
        ("columns of tensor memory a block", facts.tensor_memory, chip.tensor_memory),
        ("bytes spilled a thread", facts.spilled, most_spilled),
        ("matrix products without tensor cores", facts.plain_products, 0),
        ("products whose operand is overwritten while they run", facts.overwritten, 0),
    ):
        if figure > limit:
            found.append(f"{figure:,} {what}, limit {limit:,}")
    if facts.products and facts.multiplies and not facts.tensor_core:
        found.append("matrix products, and no tensor-core instruction")
    return found


def _attempt(variant: Variant) -> Facts | str:
    try:
        return compile_variant(variant)
    except Exception as error:  # whatever the compiler ends with is this variant's failure
        return " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())


@contextmanager
def _mapping(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map`, over that many processes."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield pool.map


_COLUMNS = "{:<26} {:<58} {:>13} {:<6} {:>9} {:>4} {:>6} {:>6} {:>7}  {}"
_HEADER = _COLUMNS.format(
    "kernel", "call", "config", "chip", "shared KB", "regs", "spill", "tensor", "blocks", ""
)


def _line(variant: Variant, case: Case, config: str, facts: Facts | str, found: list[str]) -> str:
    names = (variant.kernel, str(case), config, variant.chip)
    if isinstance(facts, str):
        return _COLUMNS.format(*names, "", "", "", "", "", found[0])
    return _COLUMNS.format(
        *names,
        f"{facts.shared / 1024:.1f}",
        facts.registers,
        facts.spilled,
        facts.tensor_core,
        facts.blocks_per_sm,
        "; ".join(found),
    )
