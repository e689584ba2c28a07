"""64-bit addresses: inputs whose rows are more than 2³¹ elements apart."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops.cross_entropy import cross_entropy_
from nsa.spec import NSASpec
from tests.ops.cases import Case, Function, Inputs, default, selection
from tests.ops.cases import one_thread as one_thread
from tests.ops.selector import results
from tests.ops.triton.parity import BRANCHES, DEVICE, computed, inputs

BEYOND = 2**31 + 2**22
MAP_NORESERVE = 0x4000  # of Linux; the module mmap has it from Python 3.13 on
CASE = Case(NSASpec(4, 2, 20, 3, 1, 1, 37), (140,), kv_heads=1, group=1, key_dim=4, value_dim=3)


@pytest.fixture
def memory() -> Tensor:
    """A buffer of more than 2³¹ elements; on a CPU only touched pages use memory."""
    if DEVICE.type == "cuda":
        return torch.zeros(BEYOND, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, 4 * BEYOND, flags=flags)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32)


def far_apart(x: Tensor, memory: Tensor, index: int) -> Tensor:
    """A copy of x [1, T, H, D] in `memory` whose last row starts beyond 2³¹."""
    step = 2**31 // (x.shape[1] - 1) + 1
    rows = torch.as_strided(memory.data, x.shape, (0, step, x.shape[3], 1), 64 * index)
    return rows.copy_(x)


@pytest.mark.parametrize("branch", default(1, ["mixed", *BRANCHES]))
def test_inputs_that_reach_beyond_32_bits_give_the_same_bits(branch: str, memory: Tensor) -> None:
    def run(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in given]
        o = function(*given)
        o = o[0] if isinstance(o, tuple) else o
        gradient = far_apart(o.detach().cos(), memory, 8)
        return [o.detach(), *torch.autograd.grad(o, given, gradient)]

    x = inputs(CASE)
    far = Inputs(*(far_apart(y, memory, i) for i, y in enumerate(x.tensors())))
    expected = computed(CASE, branch, "triton", x, run)
    for a, b in zip(computed(CASE, branch, "triton", far, run), expected, strict=True):
        assert torch.equal(a, b)


def test_selection_from_inputs_that_reach_beyond_32_bits_is_the_same(memory: Tensor) -> None:
    x = inputs(CASE)
    far = Inputs(*(far_apart(y, memory, i) for i, y in enumerate(x.tensors())))
    assert torch.equal(selection(far, CASE, "triton"), selection(x, CASE, "triton"))


def test_the_selector_loss_of_inputs_that_reach_beyond_32_bits_is_the_same(memory: Tensor) -> None:
    x = inputs(CASE)
    far = Inputs(*(far_apart(y, memory, i) for i, y in enumerate(x.tensors())))
    assert all(map(torch.equal, results(CASE, "triton", far), results(CASE, "triton", x)))


def test_the_loss_of_logits_beyond_32_bits_is_that_of_the_row(memory: Tensor) -> None:
    logits = memory[: 2049 << 20].view(2049, 1 << 20)
    logits[-1, :1000] = torch.arange(1000.0) / 100  # the row begins at 2³¹
    labels = torch.full((2049,), -100, device=DEVICE)
    labels[-1] = 7
    losses = cross_entropy_(logits, labels, False, backend="triton")
    expected = F.cross_entropy(logits[-1:].double(), labels[-1:])
    torch.testing.assert_close(losses[-1], expected.float())
