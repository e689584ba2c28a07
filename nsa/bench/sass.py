"""Machine code of a kernel, as nvdisasm prints it: instructions and labels."""

from __future__ import annotations

import re
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+\s+)?([A-Z]\S*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


class Instruction(NamedTuple):
    """One instruction; `target`: the label that it may jump to."""

    predicated: bool
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.name} {self.operands}"

    @property
    def kind(self) -> str:
        """The name without its modifiers."""
        return self.name.split(".")[0]

    @property
    def target(self) -> str | None:
        match = _TARGET.search(self.operands)
        return match and match[1]


def parse(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of nvdisasm's output, and the position of each label."""
    program: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(program)
        elif match := _INSTRUCTION.match(line):
            program.append(Instruction(bool(match[1]), *match.group(2, 3)))
    return program, labels
