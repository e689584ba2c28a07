"""Bounds checks: planted accesses outside of a tensor are caught, in the interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.bounds import OutOfBounds
from tests.ops.triton.parity import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter checks")
ROWS, SIZE = 5, 12


@triton.jit
def row_sums(x, o, step, first, last, o_first, TILE: tl.constexpr):
    """Sum elements `first` to `last` of each row of x, whose rows are `step` elements apart."""
    row, n = tl.program_id(0), tl.arange(0, TILE)
    tile = tl.load(x + row * step + n + first, mask=n < last - first, other=0.0)
    tl.store(o + o_first + row, tl.sum(tile))


def rows_and_output() -> tuple[Tensor, Tensor]:
    """Two tensors of which one follows the other in memory."""
    memory = torch.arange(ROWS * SIZE + ROWS, dtype=torch.float32, device=DEVICE)
    return memory[:-ROWS].view(ROWS, SIZE), memory[-ROWS:]


def sums(
    x: Tensor, o: Tensor, step: int = SIZE, first: int = 0, last: int = SIZE, o_first: int = 0
) -> Tensor:
    row_sums[ROWS,](x, o, step, first, last, o_first, 16)
    return o


def test_a_correct_kernel_passes() -> None:
    x, o = rows_and_output()
    torch.testing.assert_close(sums(x, o), x.sum(1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"first": 1, "last": SIZE + 1}, r"load at element 60 of x \(.*which spans 60; 1 of 12 "),
        ({"first": -1}, r"program \(0, 0, 0\): load at element -1 of x .*; 1 of 13 "),
        ({"step": SIZE + 1}, r"load at element 60 of x .*; 4 of 12 unmasked lanes are outside"),
        ({"last": 16}, r"program \(4, 0, 0\): load at element 60 of x .*; 4 of 16 "),
        ({"o_first": 1}, r"program \(4, 0, 0\): store at element 5 of o .*which spans 5; 1 of 1 "),
        ({"o_first": -1}, r"program \(0, 0, 0\): store at element -1 of o "),
    ],
    ids=["last read", "first read", "stride", "mask", "last store", "first store"],
)
def test_an_access_off_by_one_is_caught(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(OutOfBounds, match=f"^row_sums, .*{message}"):
        sums(*rows_and_output(), **wrong)


def test_a_view_of_a_larger_tensor_has_gaps_and_an_end() -> None:
    x, o = rows_and_output()
    view = x[:, 4:8]
    torch.testing.assert_close(sums(view, o, last=4), view.sum(1))
    for first, last, element in ((-1, 4, 47), (0, 5, 52)):
        with pytest.raises(OutOfBounds, match=f"load at element {element} of x .* spans 52; 1 of "):
            sums(view, o, first=first, last=last)
