"""64-bit addresses: inputs whose rows are more than 2³¹ elements apart."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops.per_token import cross_entropy_
from nsa.ops.triton import selected
from nsa.ops.triton.configs import Config, override_choices
from nsa.ops.triton.selected import queries_by_block
from nsa.spec import NSASpec
from tests.ops.cases import Case, Function, with_gradients
from tests.ops.fused import LAYOUTS, Documents, norm, pool, rotary, selector, swiglu
from tests.ops.triton.parity import DEVICE, Run, computed, inputs, settings

BEYOND = 2**31 + 2**22
MAP_NORESERVE = 0x4000  # of Linux; the module mmap has it from Python 3.13 on

Check = Callable[[], object]


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


@contextmanager
def narrow_integers(limit: int) -> Iterator[None]:
    """Let int32 products, and int32 offsets from a pointer, end at `limit` instead of 2³¹.

    So small tensors show which offsets would overflow in large ones. Positions, the rows of a batch
    row and offsets inside a tile stay below the limit; what grows with a tensor does not.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    with ExitStack() as stack:
        for name, checked in (("create_mul", -1), ("create_addptr", 1)):
            create = getattr(builder, name)

            def run(*operands: Any, create: Any = create, checked: int = checked) -> Any:
                result = create(*operands)
                x = (*operands, result)[checked].data
                assert x.dtype != np.int32 or abs(x).max() < limit, f"an offset of {abs(x).max()}"
                return result

            stack.enter_context(mock.patch.object(builder, name, run))
        yield


SPEC = NSASpec(4, 2, 20, 3, 1, 1, 37)
WIDE = Case(SPEC, (100,), batch=2, kv_heads=1, group=3, key_dim=16, value_dim=16)
PACKED = replace(WIDE, batch=1, kv_heads=2, lengths=(30, 0, 70))
LIMIT = 750  # for each head of keys: the stride of a row grows with them
BATCH = replace(WIDE, kv_heads=2)
MANY_BLOCKS = Case(NSASpec(2, 1, 1, 4, 0, 1, 7), (150,), batch=2, group=1)
IN_PARTS = {"queries_per_split": 50, "chunk": 24, "one_tile_head": 0}


def attends(case: Case, branch: str = "mixed", run: Run = with_gradients, **how: int) -> Check:
    def check() -> None:
        small = override_choices(lambda *_: Config(16, 16, 4, 1))
        with settings(**how), small, narrow_integers(LIMIT * case.kv_heads):
            computed(case, branch, "triton", inputs(case), run)

    return check


def outputs(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    return [function(*given)]


def lists() -> None:
    index = torch.arange(300, dtype=torch.int32)[:, None] - torch.arange(4, dtype=torch.int32)
    queries_by_block(index[None, :, None].expand(2, -1, -1, -1), None, MANY_BLOCKS.spec)


def cross_entropy() -> None:
    cross_entropy_(torch.zeros(150, 64), torch.arange(150) % 64, True, backend="triton")


CHECKS: dict[str, Check] = {
    "mixed": attends(WIDE),
    "mixed, packed": attends(PACKED),
    "mixed, in parts": attends(WIDE, **IN_PARTS),
    "mixed, packed, in parts": attends(PACKED, **IN_PARTS),
    "compressed": attends(WIDE, "compressed"),
    "window": attends(WIDE, "window"),
    "many blocks": attends(MANY_BLOCKS, "selected", outputs),
    "lists": lists,
    "RoPE and pooling": rotary(LAYOUTS["all branches"], Documents((60, 0, 31))).assert_parity,
    "RoPE, batch": rotary(LAYOUTS["mlp"], Documents((51,), batch=3)).assert_parity,
    "φ pool": pool(Documents((61, 0, 31), batch=2), 2, 8, True).assert_parity,
    "selector loss": lambda: [
        selector(x).results("triton", torch.float32) for x in (BATCH, PACKED)
    ],
    "SwiGLU": swiglu((150, 96), 48).assert_parity,
    "norm": norm((300, 24)).assert_parity,
    "cross-entropy": cross_entropy,
}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter checks")
@pytest.mark.parametrize("name", CHECKS)
def test_offsets_that_grow_with_a_tensor_have_64_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected, "STEP", 16)
    with narrow_integers(2 * LIMIT):
        CHECKS[name]()


def test_the_loss_of_logits_beyond_32_bits_is_that_of_the_row(memory: Tensor) -> None:
    logits = memory[: 2049 << 20].view(2049, 1 << 20)
    logits[-1, :1000] = torch.arange(1000.0) / 100  # the row begins at 2³¹
    labels = torch.full((2049,), -100, device=DEVICE)
    labels[-1] = 7
    losses = cross_entropy_(logits, labels, False, backend="triton")
    expected = F.cross_entropy(logits[-1:].double(), labels[-1:])
    torch.testing.assert_close(losses[-1], expected.float())
