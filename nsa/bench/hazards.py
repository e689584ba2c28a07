"""Whether a product's operand is overwritten while it runs: an assembler's error, seen in its code.

On Hopper a product of matrices (wgmma) runs beside the instructions behind it and may take its left
operand from registers, which are its own until a wait says that it is done. ptxas before CUDA 13.3
may hand them out sooner, and Triton up to 3.7 brings 12.8 for this chip. Sums are then wrong, and
nothing says so. It depends on which registers are left, so that any change may bring it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPERAND = 4  # registers of the left operand, for every type

_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+\s+)?([A-Z]\S*)\s*(.*?)\s*;")
_PRODUCT = re.compile(r"R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
# A result comes first, behind a predicate at most.
_RESULT = re.compile(r"(?:U?P\w+, )?R(\d+)\b")
_NO_RESULT = ("HGMMA", "BAR", "BRX", "JMX", "RET", "WARPSYNC", "NANOSLEEP", "R2P")
_FOUR = re.compile(r"\.128\b|^LDSM\b.*\.4$|^[HI]MMA\b")
_TWO = re.compile(r"\.64\b|\.WIDE\b|^LDSM\b.*\.2$|^CS2R(?!\.32)")
_MOST = 8  # groups that are told apart: a wait leaves 7 running at most


@dataclass(frozen=True)
class Instruction:
    """One of the chip's instructions, as nvdisasm prints it."""

    predicated: bool
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.name} {self.operands}"

    def results(self) -> range:
        """The registers that it writes."""
        found = _RESULT.match(self.operands)
        if not found or self.name.split(".")[0] in _NO_RESULT:
            return range(0)
        count = 4 if _FOUR.search(self.name) else 2 if _TWO.search(self.name) else 1
        return range(int(found[1]), int(found[1]) + count)

    @property
    def target(self) -> str | None:
        """The label that it names, where it may jump."""
        found = _TARGET.search(self.operands)
        return found and found[1]

    def ends(self) -> bool:
        """Whether the instruction behind it is never next."""
        jumps = self.name == "BRA" and self.operands.startswith("`")
        return not self.predicated and (jumps or self.name.split(".")[0] in ("EXIT", "RET"))


def overwritten(code: str) -> list[tuple[str, str]]:
    """Each product whose operand is written while it may run, and the first to do so.

    `code` is what nvdisasm makes of a binary for sm_90.
    """
    instructions, labels = parsed(code)
    found = []
    for place, product in enumerate(instructions):
        operand = _PRODUCT.match(product.operands) if product.name.startswith("HGMMA") else None
        if operand:
            registers = range(int(operand[1]), int(operand[1]) + OPERAND)
            by = _overwriting(instructions, labels, place, registers)
            found += [(str(product), str(by))] if by else []
    return found


def parsed(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """What nvdisasm prints: instructions, and where labels stand among them."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(Instruction(bool(instruction[1]), *instruction.group(2, 3)))
    return instructions, labels


def _overwriting(
    instructions: list[Instruction], labels: dict[str, int], product: int, registers: range
) -> Instruction | None:
    """Follow every way from a product to the waits that it is done by.

    Products are waited for in groups: so many of the latest may still run behind a wait. The last
    one of a group is marked. Counted are the groups that have ended, the product's own among them.
    """
    ways, seen = [(product, 0)], set()
    while ways:
        place, groups = way = ways.pop()
        if way in seen or place == len(instructions):
            continue
        seen.add(way)
        at = instructions[place]
        if set(at.results()) & set(registers):
            return at
        if at.name.startswith("HGMMA") and at.operands.endswith("gsb0"):
            groups = min(groups + 1, _MOST)
        wait = _WAIT.match(at.operands) if at.name.startswith("WARPGROUP.DEPBAR") else None
        if wait and groups > int(wait[1], 16):
            continue
        if at.target:
            ways.append((labels[at.target], groups))
        if not at.ends():
            ways.append((place + 1, groups))
    return None
