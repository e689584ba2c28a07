"""What each innermost loop of a kernel is bound by, counted in its machine code.

A loop is the code between a label and the last jump back to it. Every instruction in it counts
once, also one that a jump inside the loop may skip, for one warp and one pass. A multiprocessor
has four schedulers, each with pipes of its own; they share the shared memory. A warp's instruction
takes these cycles of a scheduler:

    issue        1      any instruction
    tensor       multiply-adds / 256 on sm_80, / 512 on sm_90, in bf16; twice that in TF32
    fma          2 on sm_80, 1 on sm_90: fp32 multiply and add, integer multiply-add
    alu          2      other fp32 and integer arithmetic: compare, maximum, select, convert
    exponential  8      exp2 and other special functions, conversion between integer and float
    shared       4      per 128 bytes that a warp moves or, on sm_90, a product reads; shuffles

The bound is the largest sum, as if all else overlapped with it. So it is a lower bound: latency,
barriers, bank conflicts and global memory come on top. Counts, not measurements.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from nsa.bench.sass import Instruction, parse

# Of an instruction's name: what it works on, and the pipe that it takes besides an issue slot.
_CLASSES = [
    (re.compile(names), kind, pipe)
    for names, kind, pipe in (
        (r"[A-Z]G?MMA", "tensor", "tensor"),
        (r"MUFU|I2F$|F2I|F2F$|FRND|POPC|FLO", "exponential", "exponential"),
        (r"FFMA|FADD|FMUL|H(FMA|ADD|MUL)2", "fp32", "fma"),
        (r"F", "fp32", "alu"),
        (r"LDS|STS|SHFL|ATOMS|LDGSTS", "shared", "shared"),
        (r"BAR|WARP|DEPBAR|LDGDEPBAR|MEMBAR|FENCE|B?SYNC", "barriers", ""),
        (r"U[A-Z]|R2UR|S2|BRA|CALL|BS|BREAK|EXIT|NOP|LD|ST|ATOM|RED|YIELD", "other", ""),
        (r"IMAD|IMUL|IDP", "integer", "fma"),
        (r"", "integer", "alu"),
    )
]
KINDS = ("tensor", "fp32", "integer", "exponential", "shared", "barriers", "other")
PIPES = ("issue", "tensor", "fma", "alu", "exponential", "shared")
_PRODUCT = re.compile(r"HMMA\.(16)(8)(\d+)\.|HGMMA\.(64)x(\d+)x(\d+)\.")
_WIDE = re.compile(r"\.(64|128)\b|\.([24])$")


class Rates(NamedTuple):
    """Of one scheduler of a chip; see the top of this file."""

    tensor: int  # bf16 multiply-adds per cycle
    fma: int  # cycles per instruction of a warp


RATES = {"sm_80": Rates(256, 2), "sm_90": Rates(512, 1)}


@dataclass(frozen=True)
class Loop:
    """Instructions of a warp in one pass by kind, their cycles by pipe, and the bound."""

    instructions: dict[str, int]
    cycles: dict[str, int]
    bound_by: str  # the pipe with the most cycles
    tensor_share: float  # cycles of tensor instructions over those of the bound


def loops(code: str, chip: str) -> list[Loop]:
    """Return a binary's innermost loops in their order; `code`: nvdisasm's output."""
    program, labels = parse(code)
    ends: dict[int, int] = {}
    for position, instruction in enumerate(program):
        if instruction.kind == "BRA" and instruction.target:
            begin = labels[instruction.target]
            if begin < position:  # a jump to itself is the padding after the last EXIT
                ends[begin] = position
    spans = sorted(ends.items())
    return [
        _loop(program[begin : end + 1], RATES[chip])
        for begin, end in spans
        if not any(begin <= a and b <= end for a, b in spans if (a, b) != (begin, end))
    ]


def _loop(body: list[Instruction], rates: Rates) -> Loop:
    kinds: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    cycles: Counter[str] = Counter(dict.fromkeys(PIPES, 0))
    for instruction in body:
        kind, pipe = next((k, p) for names, k, p in _CLASSES if names.match(instruction.kind))
        kinds[kind] += 1
        cycles["issue"] += 1
        if pipe == "tensor":
            tensor, shared = _product_cycles(instruction, rates)
            cycles.update({"tensor": tensor, "shared": shared})
        elif pipe:
            cycles[pipe] += {"fma": rates.fma, "alu": 2, "exponential": 8}.get(pipe) or (
                4 * _width(instruction.name)
            )
    bound_by, bound = cycles.most_common(1)[0]
    return Loop(dict(kinds), dict(cycles), bound_by, cycles["tensor"] / bound)


def _product_cycles(product: Instruction, rates: Rates) -> tuple[int, int]:
    """Cycles of the tensor pipe, and of the shared memory that an sm_90 product reads."""
    match = _PRODUCT.match(product.name)
    if match is None:
        raise ValueError(f"{product}: no rate is known for it; fix: add it to nsa/bench/loops.py")
    rows, columns, depth = (int(size) for size in match.groups() if size)
    tensor = rows * columns * depth // rates.tensor * (2 if "TF32" in product.name else 1)
    if product.kind == "HMMA":
        return tensor, 0
    # Four warps, one of each scheduler, compute it together from 32 bytes of each row of its
    # operands; the left one may be in registers.
    shared_rows = columns + rows * (product.operands.split(", ")[1].startswith("gdesc"))
    return tensor // 4, shared_rows * 32 // 128


def _width(name: str) -> int:
    """How often 4 bytes a lane an instruction moves."""
    match = _WIDE.search(name)
    return 1 if match is None else int(match[1]) // 32 if match[1] else int(match[2])
