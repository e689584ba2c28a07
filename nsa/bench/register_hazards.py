"""Hopper products whose operand registers are overwritten while they run: an assembler bug.

On Hopper a matrix product (wgmma) runs asynchronously and may read its left operand from registers,
which stay reserved until a wait for it. ptxas before CUDA 13.3 may reuse them earlier, and Triton
up to 3.7 ships 12.8 for this chip. Sums are then silently wrong. It depends on register allocation,
so any change of a kernel may trigger it.
"""

from __future__ import annotations

import re

from nsa.bench.sass import Instruction, parse

OPERAND = 4  # registers of the left operand, for every type
MAX_GROUPS = 8  # groups to tell apart: a wait leaves at most 7 running

_PRODUCT = re.compile(r"R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_RESULT = re.compile(r"(?:U?P\w+, )?R(\d+)\b")  # the first operand, after at most a predicate
_NO_RESULT = ("HGMMA", "BAR", "BRX", "JMX", "RET", "WARPSYNC", "NANOSLEEP", "R2P")
_FOUR = re.compile(r"\.128\b|^LDSM\b.*\.4$|^[HI]MMA\b")
_TWO = re.compile(r"\.64\b|\.WIDE\b|^LDSM\b.*\.2$|^CS2R(?!\.32)")


def overwritten(code: str) -> list[tuple[str, str]]:
    """Return each product whose operand is written while it may run, with the first writer.

    `code` is nvdisasm's output for an sm_90 binary.
    """
    program, labels = parse(code)
    hazards = []
    for position, product in enumerate(program):
        operand = _PRODUCT.match(product.operands) if product.name.startswith("HGMMA") else None
        if operand and (writer := _first_writer(program, labels, position, int(operand[1]))):
            hazards.append((str(product), str(writer)))
    return hazards


def _first_writer(
    program: list[Instruction], labels: dict[str, int], product: int, operand: int
) -> Instruction | None:
    """Follow every path from a product to the waits that guarantee its completion.

    Products are waited for in groups, whose last one is marked: after a wait, at most a given
    number of the latest groups still run. The search counts the groups closed since the product.
    """
    paths, visited = [(product, 0)], set()
    while paths:
        position, groups = path = paths.pop()
        if path in visited or position == len(program):
            continue
        visited.add(path)
        current = program[position]
        kind = current.kind
        if kind == "HGMMA" and current.operands.endswith("gsb0"):
            groups = min(groups + 1, MAX_GROUPS)
        result = _RESULT.match(current.operands)
        if result and kind not in _NO_RESULT:
            count = 4 if _FOUR.search(current.name) else 2 if _TWO.search(current.name) else 1
            if operand - count < int(result[1]) < operand + OPERAND:
                return current
        if current.name.startswith("WARPGROUP.DEPBAR"):
            wait = _WAIT.match(current.operands)
            if wait and groups > int(wait[1], 16):
                continue
        if current.target:
            paths.append((labels[current.target], groups))
        jumps = kind in ("EXIT", "RET") or (kind == "BRA" and current.operands.startswith("`"))
        if current.predicated or not jumps:
            paths.append((position + 1, groups))
    return None
