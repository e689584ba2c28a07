"""Hopper products whose operand registers are overwritten while they run: an assembler bug.

On Hopper a matrix product (wgmma) runs asynchronously and may read its left operand from registers,
which stay reserved until a wait for it. ptxas before CUDA 13.3 may reuse them earlier, and Triton
up to 3.7 ships 12.8 for this chip. Sums are then silently wrong. It depends on register allocation,
so any change of a kernel may trigger it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPERAND = 4  # registers of the left operand, for every type
MAX_GROUPS = 8  # groups to tell apart: a wait leaves at most 7 running

_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+\s+)?([A-Z]\S*)\s*(.*?)\s*;")
_PRODUCT = re.compile(r"R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_RESULT = re.compile(r"(?:U?P\w+, )?R(\d+)\b")  # the first operand, after at most a predicate
_NO_RESULT = ("HGMMA", "BAR", "BRX", "JMX", "RET", "WARPSYNC", "NANOSLEEP", "R2P")
_FOUR = re.compile(r"\.128\b|^LDSM\b.*\.4$|^[HI]MMA\b")
_TWO = re.compile(r"\.64\b|\.WIDE\b|^LDSM\b.*\.2$|^CS2R(?!\.32)")


@dataclass(frozen=True)
class Instruction:
    """A machine instruction as nvdisasm prints it."""

    predicated: bool
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.name} {self.operands}"

    def results(self) -> range:
        """The registers that it writes."""
        match = _RESULT.match(self.operands)
        if not match or self.name.split(".")[0] in _NO_RESULT:
            return range(0)
        count = 4 if _FOUR.search(self.name) else 2 if _TWO.search(self.name) else 1
        return range(int(match[1]), int(match[1]) + count)

    @property
    def target(self) -> str | None:
        """The label that it may jump to."""
        match = _TARGET.search(self.operands)
        return match and match[1]

    def ends(self) -> bool:
        """Whether the next instruction is never reached from here."""
        jumps = self.name == "BRA" and self.operands.startswith("`")
        return not self.predicated and (jumps or self.name.split(".")[0] in ("EXIT", "RET"))


def overwritten(code: str) -> list[tuple[str, str]]:
    """Each product whose operand is written while it may run, with the first such instruction.

    `code` is nvdisasm's output for an sm_90 binary.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            instructions.append(Instruction(bool(match[1]), *match.group(2, 3)))
    hazards = []
    for position, product in enumerate(instructions):
        operand = _PRODUCT.match(product.operands) if product.name.startswith("HGMMA") else None
        if operand:
            registers = range(int(operand[1]), int(operand[1]) + OPERAND)
            writer = _first_writer(instructions, labels, position, registers)
            hazards += [(str(product), str(writer))] if writer else []
    return hazards


def _first_writer(
    instructions: list[Instruction], labels: dict[str, int], product: int, registers: range
) -> Instruction | None:
    """Follow every path from a product to the waits that guarantee its completion.

    Products are waited for in groups, whose last one is marked: after a wait, at most a given
    number of the latest groups still run. The search counts the groups closed since the product.
    """
    paths, visited = [(product, 0)], set()
    while paths:
        position, groups = path = paths.pop()
        if path in visited or position == len(instructions):
            continue
        visited.add(path)
        current = instructions[position]
        if set(current.results()) & set(registers):
            return current
        if current.name.startswith("HGMMA") and current.operands.endswith("gsb0"):
            groups = min(groups + 1, MAX_GROUPS)
        if current.name.startswith("WARPGROUP.DEPBAR"):
            wait = _WAIT.match(current.operands)
            if wait and groups > int(wait[1], 16):
                continue
        if current.target:
            paths.append((labels[current.target], groups))
        if not current.ends():
            paths.append((position + 1, groups))
    return None
