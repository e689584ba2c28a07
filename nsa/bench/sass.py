"""What one turn of a compiled kernel's loop costs, read from its instructions: an estimate.

Every instruction takes its turn at a unit of the multiprocessor, which takes in so many lanes or
bytes a clock. The busiest unit bounds a turn, if all that the others do hides behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nsa.bench.compiled import disassembled
from nsa.bench.hazards import Instruction, parsed

# What a multiprocessor takes in a clock: instructions and multiply-adds by lane (CUDA programming
# guide, "arithmetic instructions"), bytes of shared memory and, for a fair share, of the L2 cache.
UNITS = {
    "sm_80": {"products": 1024, "issue": 128, "float": 64, "integer": 64, "exp": 16}
    | {"shared": 128, "L2": 5120 / 108},
    "sm_90": {"products": 2048, "issue": 128, "float": 128, "integer": 64, "exp": 16}
    | {"shared": 128, "L2": 5120 / 132},
}
FLOAT = ("FADD", "FMUL", "FFMA", "IMAD")  # IMAD runs beside them
ELSEWHERE = ("MOV", "UMOV", "NOP", "BRA", "BAR", "CS2R", "S2R", "R2UR", "WARPGROUP", "SHFL")
WARP = 32

_PRODUCT = {
    r"HMMA\.16816": 16 * 8 * 16,  # of a warp
    r"HMMA\.1688": 16 * 8 * 8,
    r"HGMMA\.64x(\d+)x(\d+)": 16,  # a warp's 16 of 64 rows, times what the name says
}
_BYTES = re.compile(r"\.(128|64|32|U?16|U?8)\b")


@dataclass(frozen=True)
class Loop:
    """One turn of a loop, for a block of threads."""

    instructions: int  # of a warp
    cycles: dict[str, float]  # of a multiprocessor, by unit

    def with_products(self, slower: float) -> Loop:
        """The same where products take so many times as long."""
        return Loop(self.instructions, self.cycles | {"products": self.cycles["products"] * slower})

    @property
    def bound(self) -> str:
        """The unit that is busy longest."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def least(self) -> float:
        """Clocks of a multiprocessor, where everything else hides behind the busiest unit."""
        return self.cycles[self.bound]


def loops(cubin: bytes, chip: str, warps: int) -> list[Loop]:
    """The loops that multiply matrices, as they stand in a binary."""
    return loops_of(disassembled(cubin), chip, warps)


def loops_of(code: str, chip: str, warps: int) -> list[Loop]:
    """The same of what nvdisasm prints; inner loops alone."""
    found = []
    for body in _bodies(code):
        loop = _loop(body, chip, warps)
        if loop.cycles["products"]:
            found.append(loop)
    return found


def _bodies(code: str) -> Iterator[list[Instruction]]:
    """Instructions from a label to a branch back to it, where none lies between."""
    instructions, labels = parsed(code)
    taken = 0  # what lies before is part of a loop that was given already
    for place, at in enumerate(instructions):
        if at.name.startswith("BRA") and at.target and taken <= labels[at.target] <= place:
            yield instructions[labels[at.target] : place + 1]
            taken = place + 1


def _loop(body: list[Instruction], chip: str, warps: int) -> Loop:
    used = dict.fromkeys(UNITS[chip], 0.0)
    for at in body:
        name, kind = at.name, at.name.split(".")[0]
        used["issue"] += WARP
        if made := _multiply_adds(name):
            used["products"] += made
        elif kind == "MUFU":
            used["exp"] += WARP
        elif kind in FLOAT:
            used["float"] += WARP
        elif kind in ("LDSM", "LDS", "STS", "STSM"):
            used["shared"] += _bytes(name)
        elif kind in ("LDGSTS", "LDG"):
            used["L2"] += _bytes(name)
            used["shared"] += _bytes(name) if kind == "LDGSTS" else 0
        elif kind not in ELSEWHERE and not kind.startswith("U"):
            used["integer"] += WARP
    rates = UNITS[chip]
    return Loop(len(body), {unit: amount * warps / rates[unit] for unit, amount in used.items()})


def _multiply_adds(name: str) -> int:
    """Of a warp, by one instruction of the tensor cores."""
    for pattern, made in _PRODUCT.items():
        if found := re.match(pattern, name):
            for size in found.groups():
                made *= int(size)
            return made
    return 0


def _bytes(name: str) -> int:
    """That a warp reads or writes at once: 4 a lane, where the name says nothing else."""
    if name.startswith(("LDSM", "STSM")):  # 8 x 8 matrices of 16 bits: one, or .2 or .4
        count = name.rsplit(".", 1)[1]
        return 128 * (int(count) if count.isdigit() else 1)
    found = _BYTES.search(name)
    return WARP * (int(found[1].lstrip("U")) // 8 if found else 4)
