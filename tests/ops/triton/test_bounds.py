"""Bounds checks: planted accesses outside of a tensor are caught, in the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.per_token import cross_entropy_
from nsa.ops.triton import common, per_token, pooling, selected
from tests.bounds import OutOfBounds
from tests.ops.planted_errors import Plant
from tests.ops.triton.parity import DEVICE
from tests.ops.triton.test_planted_errors import (
    DOCUMENTS,
    SELECTED,
    WINDOW,
    pool_is_that_of_pytorch,
)

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter checks")
ROWS, SIZE = 5, 12


@triton.jit
def row_sums(x, o, step, first, last, o_first, TILE: tl.constexpr):
    """Sum elements `first` to `last` of each row of x, whose rows are `step` elements apart."""
    row, n = tl.program_id(0), tl.arange(0, TILE)
    tile = tl.load(x + row * step + n + first, mask=n < last - first, other=0.0)
    tl.store(o + o_first + row, tl.sum(tile))


@triton.jit
def copies(x, o, SIZE: tl.constexpr):
    """Copy without a mask."""
    n = tl.arange(0, SIZE)
    tl.store(o + n, tl.load(x + n))


@triton.jit
def additions(o, SIZE: tl.constexpr, TILE: tl.constexpr):
    n = tl.arange(0, TILE)
    tl.atomic_add(o + n, 1.0, mask=n < SIZE)


@triton.jit
def chosen(x, y, o, first, TILE: tl.constexpr):
    """Read x in even lanes and y in odd ones."""
    n = tl.arange(0, TILE)
    tl.store(o + n, tl.load(tl.where(n % 2 == 0, x + n + first, y + n)))


@triton.jit
def described(x, o, row, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Copy the row of a tensor descriptor that claims ROWS rows."""
    rows = tl.make_tensor_descriptor(x, [ROWS, SIZE], [SIZE, 1], [1, SIZE])
    tl.store(o + tl.arange(0, SIZE), rows.load([row, 0]).reshape(SIZE))


def sums(x: Tensor, step: int = SIZE, first: int = 0, last: int = SIZE, o_first: int = 0) -> Tensor:
    o = torch.empty(ROWS, device=DEVICE)
    row_sums[ROWS,](x, o, step, first, last, o_first, 16)
    return o


def rows() -> Tensor:
    return torch.arange(ROWS * SIZE, dtype=torch.float32, device=DEVICE).view(ROWS, SIZE)


def test_a_correct_kernel_passes() -> None:
    torch.testing.assert_close(sums(rows()), rows().sum(1))


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
        sums(rows(), **wrong)


def test_a_view_of_a_larger_tensor_has_gaps_and_an_end() -> None:
    view = rows()[:, 4:8]
    torch.testing.assert_close(sums(view, last=4), view.sum(1))
    for first, last, element in ((-1, 4, 47), (0, 5, 52)):
        with pytest.raises(OutOfBounds, match=f"load at element {element} of x .* spans 52; 1 of "):
            sums(view, first=first, last=last)


def test_a_row_too_far_is_caught_where_another_tensor_follows() -> None:
    pair = torch.zeros(2, 16, device=DEVICE)
    copies[1,](pair[0], pair[1], 16)
    with pytest.raises(OutOfBounds, match="load at element 16 of x"):
        copies[1,](pair[0], pair[1], 32)


@pytest.mark.parametrize("size", [0, 15])
def test_a_store_beyond_a_shorter_tensor_is_caught(size: int) -> None:
    with pytest.raises(OutOfBounds, match=f"store at element {size} of o"):
        copies[1,](torch.zeros(16, device=DEVICE), torch.zeros(size, device=DEVICE), 16)


def test_atomic_additions_are_checked() -> None:
    o = torch.zeros(12, device=DEVICE)
    additions[1,](o, 12, 16)
    assert bool((o == 1).all())
    with pytest.raises(OutOfBounds, match="atomic_rmw at element 12 of o"):
        additions[1,](o, 13, 16)


def test_lanes_may_read_different_tensors() -> None:
    x, o = torch.arange(16.0, device=DEVICE), torch.empty(16, device=DEVICE)
    chosen[1,](x, -x, o, 0, 16)
    assert o.tolist() == [n if n % 2 == 0 else -n for n in range(16)]
    with pytest.raises(OutOfBounds, match="load at element 16 of x"):
        chosen[1,](x, -x, o, 2, 16)


def test_a_tensor_descriptor_that_claims_too_many_rows_is_caught() -> None:
    x, o = torch.arange(64.0, device=DEVICE).view(4, 16), torch.empty(16, device=DEVICE)
    described[1,](x, o, 3, 4, 16)
    assert torch.equal(o, x[3])
    with pytest.raises(OutOfBounds, match="load at element 64 of x"):
        described[1,](x, o, 4, 5, 16)


def test_the_next_launch_is_checked_and_right() -> None:
    with pytest.raises(OutOfBounds):
        sums(rows(), last=16)
    test_a_correct_kernel_passes()


def a_label_past_the_vocabulary() -> None:
    labels = torch.tensor([0, 1, 49], device=DEVICE)
    losses = cross_entropy_(torch.zeros(3, 49, device=DEVICE), labels, False, backend="triton")
    assert losses.isnan().tolist() == [False, False, True]


PLANTS = {
    "the last tile's mask": Plant(
        common, "load_rows", "mask=mask[:, None] & (d < SIZE)[None, :],",
        "mask=(d < SIZE)[None, :],", WINDOW,
    ),
    "columns of the padding": Plant(
        common, "store_rows", "mask[:, None] & (d < SIZE)[None, :]", "mask[:, None]", WINDOW
    ),
    "the offset after the last": Plant(
        common, "locate", "offsets + run + 1", "offsets + run + 2", DOCUMENTS[0]
    ),
    "queries of a step that does not come": Plant(
        selected, "selected_keys_kernel", "mask=after < rows", "mask=after < rows + 16",
        SELECTED,
    ),
    "a block's missing tokens": Plant(
        pooling, "pool_forward_kernel", "mask=valid, other=0)", "mask=i <= LEN, other=0)",
        pool_is_that_of_pytorch,
    ),
    "the logit of a label past the vocabulary": Plant(
        per_token, "cross_entropy_kernel", "(label < vocabulary)", "(label <= vocabulary)",
        a_label_past_the_vocabulary,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_an_access_planted_in_a_kernel_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTS[name].check()
    PLANTS[name].into(monkeypatch)
    with pytest.raises(OutOfBounds, match="lanes are outside"):
        PLANTS[name].check()
