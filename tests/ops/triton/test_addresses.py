"""64-bit addresses: offsets that would overflow 32 bits in large tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa.ops.per_token import cross_entropy_
from nsa.ops.triton import decode, selected
from nsa.ops.triton.selected import queries_by_block
from nsa.spec import NSASpec
from tests.ops.cases import Case, Function, with_gradients
from tests.ops.decoding import buffers, decoded, sequences
from tests.ops.fused import LAYOUTS, Documents, norm, pool, rotary, selector, swiglu
from tests.ops.tiles import small_tiles
from tests.ops.triton.parity import DEVICE, Run, computed, inputs, settings

Check = Callable[[], object]


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
MANY_BLOCKS = Case(NSASpec(2, 1, 1, 4, 0, 1, 7), (110,), batch=2, kv_heads=1, group=1)
IN_PARTS = {"queries_per_split": 50, "chunk": 24}  # of long lists; others have one


def attends(case: Case, branch: str = "mixed", run: Run = with_gradients, **how: int) -> Check:
    def check() -> None:
        with settings(**how), small_tiles(), narrow_integers(LIMIT * case.kv_heads):
            computed(case, branch, "triton", inputs(case), run)

    return check


def outputs(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    return [function(*given)]


def lists() -> None:
    index = torch.arange(220, dtype=torch.int32)[:, None] - torch.arange(4, dtype=torch.int32)
    with mock.patch.object(selected, "STEP", 32):
        queries_by_block(index[None, :, None].expand(2, -1, -1, -1), None, MANY_BLOCKS.spec)


def cross_entropy() -> None:
    cross_entropy_(torch.zeros(150, 64), torch.arange(150) % 64, True, backend="triton")


def decoding() -> None:
    spec = NSASpec(4, 4, 20, 3, 1, 1, 37)
    case = Case(spec, (3, 200), kv_heads=2, group=2, key_dim=16, value_dim=16)
    x = buffers(case, sequences(case, torch.float32), ring=120)
    with mock.patch.multiple(decode, PART=24, BLOCKS=16, ELEMENTS=32):
        decoded(case, x, backend="triton")


CHECKS: dict[str, Check] = {
    "mixed": attends(WIDE, **IN_PARTS),
    "mixed, packed": attends(PACKED, **IN_PARTS),
    "compressed": attends(WIDE, "compressed"),
    "many blocks": attends(MANY_BLOCKS, "selected", outputs),
    "lists": lists,
    "RoPE and pooling": rotary(LAYOUTS["all branches"], Documents((60, 0, 31))).assert_parity,
    "RoPE, batch": rotary(LAYOUTS["mlp"], Documents((51,), batch=3)).assert_parity,
    "φ pool": pool(Documents((61, 0, 31), batch=2), 2, 8, True).assert_parity,
    "selector loss": lambda: selector(BATCH, 1).results("triton", torch.float32),
    "SwiGLU": swiglu((150, 96), 48).assert_parity,
    "norm": norm((300, 24)).assert_parity,
    "cross-entropy": cross_entropy,
    "decoding": decoding,
}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter checks")
@pytest.mark.parametrize("name", CHECKS)
def test_offsets_that_grow_with_a_tensor_have_64_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected, "STEP", 16)
    with narrow_integers(2 * LIMIT):
        CHECKS[name]()
