"""Loops of machine code: which are innermost, what their instructions cost, and the bound."""

from __future__ import annotations

import pytest

from nsa.bench.loops import KINDS, PIPES, Loop, loops
from tests.bench.test_register_hazards import code

AGAIN = "@P0 BRA `(.L_x_1)"
HMMA = "HMMA.16816.F32.BF16 R4, R8, R12, R4"


def loop(*body: str, chip: str = "sm_80") -> Loop:
    """The only loop of these instructions, without the jump that closes it."""
    (only,) = loops(code(".L_x_1:", *body, AGAIN), chip)
    assert sum(only.instructions.values()) == len(body) + 1 == only.cycles["issue"]
    assert tuple(only.instructions) == KINDS
    return only


def test_only_innermost_loops_count_and_in_their_order() -> None:
    first = (".L_x_1:", "FADD R1, R1, R2", "@P1 BRA `(.L_x_2)", "MOV R3, R4", AGAIN)
    outer = (".L_x_0:", "IADD3 R0, R0, 0x1, RZ", *first, ".L_x_2:")
    second = (".L_x_3:", "MUFU.EX2 R1, R1", "@!P0 BRA `(.L_x_3)", "@P2 BRA `(.L_x_0)")
    padding = ("EXIT", ".L_x_4:", "BRA `(.L_x_4)")
    found = loops(code(*outer, *second, *padding), "sm_80")
    assert [sum(x.instructions.values()) for x in found] == [4, 2]
    assert [x.instructions["exponential"] for x in found] == [0, 1]


def test_a_loop_ends_with_the_last_jump_to_its_begin() -> None:
    body = ("FADD R1, R1, R2", AGAIN, "FADD R1, R1, R3")
    assert loop(*body).instructions["fp32"] == 2


@pytest.mark.parametrize(
    ("instruction", "kind", "cycles"),
    [
        (HMMA, "tensor", {"tensor": 8}),
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", "tensor", {"tensor": 8}),
        ("FFMA R0, R1, R2, R3", "fp32", {"fma": 2}),
        ("FMNMX R0, R1, R2, !PT", "fp32", {"alu": 2}),
        ("F2FP.BF16.PACK_AB R0, R1, R2", "fp32", {"alu": 2}),
        ("IMAD.WIDE R0, R1, R2, R4", "integer", {"fma": 2}),
        ("ISETP.GE.AND P0, PT, R0, R1, PT", "integer", {"alu": 2}),
        ("MUFU.EX2 R0, R1", "exponential", {"exponential": 8}),
        ("I2F R0, R1", "exponential", {"exponential": 8}),
        ("LDS R0, [R1]", "shared", {"shared": 4}),
        ("STS.128 [R1], R4", "shared", {"shared": 16}),
        ("LDSM.16.MT88.4 R0, [R1]", "shared", {"shared": 16}),
        ("LDGSTS.E.BYPASS.128 [R0], [R2.64]", "shared", {"shared": 16}),
        ("SHFL.BFLY PT, R0, R1, 0x1, 0x1f", "shared", {"shared": 4}),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barriers", {}),
        ("LDGDEPBAR", "barriers", {}),
        ("LDG.E.128 R0, [R2.64]", "other", {}),
        ("UIADD3 UR4, UR5, 0x1, URZ", "other", {}),
        ("NOP", "other", {}),
    ],
)
def test_an_instruction_takes_its_pipe(instruction: str, kind: str, cycles: dict[str, int]) -> None:
    single = loop(instruction)
    expected = {"issue": 2, **cycles}
    assert single.instructions[kind] == 1 + (kind == "other")  # the jump
    assert single.cycles == {pipe: expected.get(pipe, 0) for pipe in PIPES}


@pytest.mark.parametrize(
    ("product", "tensor", "shared"),
    [
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", 32, 32),
        ("HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR4].tnspB, R24", 32, 16),
        ("HGMMA.64x128x8.F32.TF32 R24, R60, gdesc[UR4], R24", 64, 32),
        (HMMA, 4, 0),
    ],
)
def test_hoppers_products_read_shared_memory(product: str, tensor: int, shared: int) -> None:
    cycles = loop(product, "FFMA R0, R1, R2, R3", chip="sm_90").cycles
    assert (cycles["tensor"], cycles["shared"], cycles["fma"]) == (tensor, shared, 1)


def test_the_bound_is_the_pipe_with_the_most_cycles() -> None:
    issue = loop(*["NOP"] * 31, HMMA, HMMA)
    assert (issue.bound_by, issue.tensor_share) == ("issue", 16 / 34)
    tensor = loop(HMMA, HMMA, "MUFU.EX2 R0, R1")
    assert (tensor.bound_by, tensor.tensor_share) == ("tensor", 1.0)


def test_a_product_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"DMMA.884 .*: no rate is known for it; fix: "):
        loop("DMMA.884 R4, R8, R12, R4")
