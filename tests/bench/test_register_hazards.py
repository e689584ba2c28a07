"""Overwritten operand registers are detected exactly where a running product still reads them."""

from __future__ import annotations

import pytest

from nsa.bench.register_hazards import overwritten

FIRST = "HGMMA.64x64x16.F32.BF16 R24, R68, gdesc[UR4].tnspB, R24, gsb0"
SECOND = "HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR4].tnspB, R24, gsb0"
WAIT_ALL, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
EARLY = "LDS.U16 R70, [R13+UR6+0x6000]"


def code(*lines: str) -> str:
    """As nvdisasm prints it: labels, and instructions with their addresses."""
    every = (*lines, "EXIT")
    return "\n".join(
        line if line.startswith(".L") else f"        /*{16 * at:04x}*/   {line} ;"
        for at, line in enumerate(every)
    )


@pytest.mark.parametrize(
    "lines",
    [
        (FIRST, WAIT_ALL, EARLY),
        (FIRST, SECOND, WAIT_BUT_ONE, EARLY, WAIT_ALL),
        (FIRST, "LDS.U16 R72, [R13]", "LDS.64 R66, [R13]", "STS [R70], R69", WAIT_ALL),
        (FIRST, "ISETP.NE.AND P0, PT, R70, RZ, PT", "@P0 BRA `(.L_x_1)", WAIT_ALL, EARLY,
         ".L_x_1:", WAIT_ALL, EARLY),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", EARLY, "IMAD R24, R8, R9, R10"),
    ],
)  # fmt: skip
def test_writes_after_the_wait_or_to_other_registers_are_no_hazard(lines: tuple[str, ...]) -> None:
    assert overwritten(code(*lines)) == []


@pytest.mark.parametrize(
    ("lines", "by"),
    [
        ((FIRST, EARLY, WAIT_ALL), EARLY),
        ((FIRST, WAIT_BUT_ONE, EARLY, WAIT_ALL), EARLY),
        ((FIRST, "@P1 IMAD.MOV.U32 R69, RZ, RZ, R4"), "IMAD.MOV.U32 R69, RZ, RZ, R4"),
        ((FIRST, "LDS.128 R65, [R13]", WAIT_ALL), "LDS.128 R65, [R13]"),
        ((FIRST, "IMAD.WIDE R67, R4, R5, R6", WAIT_ALL), "IMAD.WIDE R67, R4, R5, R6"),
        ((FIRST, "SHFL.BFLY PT, R71, R4, 0x1, 0x1f", WAIT_ALL), "SHFL.BFLY PT, R71, R4, 0x1, 0x1f"),
        ((FIRST, "@P0 BRA `(.L_x_1)", WAIT_ALL, ".L_x_1:", EARLY), EARLY),
    ],
)
def test_writes_before_the_wait_are_hazards(lines: tuple[str, ...], by: str) -> None:
    assert overwritten(code(*lines)) == [(FIRST, by)]


def test_a_write_in_the_next_iteration_of_a_loop_is_a_hazard() -> None:
    body = (".L_x_0:", EARLY, "LDS R60, [R13]", FIRST, WAIT_BUT_ONE, SECOND, WAIT_BUT_ONE)
    assert overwritten(code(*body, "@!P0 BRA `(.L_x_0)", WAIT_ALL)) == [
        (SECOND, "LDS R60, [R13]"),
    ]
