"""Kernels of pool: parity with PyTorch, dtypes, the same bits, declarations, and launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.ops.inputs import PoolInputs
from nsa.ops.triton.launch import recording
from nsa.ops.triton.pooling import pool_backward, pool_forward, triton_pool
from tests.ops.cases import check_declaration, with_gradients
from tests.ops.pooling import angles, inputs, pooled
from tests.ops.projections import DOCUMENTS, Documents
from tests.ops.triton.parity import DEVICE, RULE, assert_exact_enough

# Documents, heads, size. Several steps of a program, several programs, halves that are padded.
CASES = {
    "blocks longer than a step": (Documents((45,), l=33, d=16), 1, 32),
    "two runs of tokens": (Documents((270,), l=8, d=4, batch=2), 1, 4),
    "heads": (Documents((40, 0, 3), l=8, d=4), 3, 24),
    **{str(documents): (documents, 2, 6) for documents in DOCUMENTS},
}
sides = pytest.mark.parametrize("rotates", [True, False], ids=["keys", "values"])


def results(
    documents: Documents, heads: int, size: int, rotates: bool, backend: str, dtype: torch.dtype
) -> list[Tensor]:
    """y, and the gradients of x, weight, position and scale."""
    x = [y.to(DEVICE, dtype) for y in inputs(documents, heads, size, torch.float32)]
    return with_gradients(pooled(documents, rotates, backend), x)


def assert_pool_parity(documents: Documents, heads: int, size: int, rotates: bool) -> None:
    case = documents, heads, size, rotates
    assert_exact_enough(*(results(*case, backend, dtype) for backend, dtype in RULE))


@sides
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_are_those_of_pytorch(
    case: tuple[Documents, int, int], rotates: bool
) -> None:
    """Uninitialised memory is NaN here, so every result must be written."""
    assert_pool_parity(*case, rotates)


@sides
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_in_two_bytes_are_nearly_as_exact_as_pytorchs(
    dtype: torch.dtype, rotates: bool
) -> None:
    """Scores' gradients are rounded for the products, as those of attention are."""
    documents = Documents((70,), l=16, d=8)
    given = [y.to(DEVICE, dtype) for y in inputs(documents, 2, 16, torch.float32)]
    actual = with_gradients(pooled(documents, rotates, "triton"), given)
    exact = with_gradients(pooled(documents, rotates), [y.double() for y in given])
    for number, (a, b) in enumerate(zip(actual, exact, strict=True)):
        assert a.dtype == dtype
        roundings = 1 if number == 0 else 4
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error <= roundings * torch.finfo(dtype).eps


def test_three_runs_give_the_same_bits() -> None:
    case = Documents((150,), l=8, d=4, batch=2), 2, 6, True, "triton", torch.float32
    first = results(*case)
    for _ in range(2):
        torch.testing.assert_close(results(*case), first, rtol=0, atol=0)


def test_the_ops_match_their_declarations() -> None:
    documents = DOCUMENTS[1]
    x = [y.to(DEVICE) for y in inputs(documents, 2, 6, torch.float32)]
    rest = [y.to(DEVICE) for y in (*angles(documents, 6), *documents.tables())]
    trained = [y.clone().requires_grad_() for y in x]
    check_declaration(triton_pool, (*trained, *rest))
    y, pooled_blocks, lse = triton_pool(*x, *rest)
    backward = torch.ops.nsa.triton_pool_backward.default
    given = (y, *x, *rest, pooled_blocks, lse)
    check_declaration(backward, given)


def test_launches_are_few_and_wait_for_no_value() -> None:
    """Tensors of the `meta` device have none: reading one raises."""
    documents = DOCUMENTS[1]
    x = [y.to("meta") for y in inputs(documents, 2, 6, torch.float32)]
    rest = [y.to("meta") for y in (*angles(documents, 6), *documents.tables())]
    given = PoolInputs(*x, *rest)
    with recording() as launches:
        y, pooled_blocks, lse = pool_forward(given)
        pool_backward(y, given, pooled_blocks, lse)
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "pool_forward_kernel",
        "pool_backward_kernel",
        "sum_parts_kernel",
    ]
