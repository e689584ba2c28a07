"""pool in PyTorch: its definition, gradients, dtypes, its start, and arguments that raise."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from nsa.ops import compress_mean, fallback_counts, reset_fallback_counts
from nsa.ops import triton as triton_backend
from nsa.ops.pooling import pool, pool_blocks, torch_pool
from nsa.spec import NSASpec
from tests.ops.cases import check_declaration, with_gradients
from tests.ops.pooling import angles, defined, inputs, pooled
from tests.ops.projections import DOCUMENTS, Documents

sides = pytest.mark.parametrize("rotates", [True, False], ids=["keys", "values"])


@sides
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(
    documents: Documents, rotates: bool
) -> None:
    """Without a block the gradients are zeros: every parameter gets one."""
    x = inputs(documents, heads=2, size=6)
    actual, expected = (with_gradients(f(documents, rotates), x) for f in (pooled, defined))
    for a, b in zip(actual, expected, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_weights_of_zero_and_a_scale_of_one_give_the_mean() -> None:
    documents = Documents((37,), l=8, d=4)
    x, weight, position, scale = inputs(documents, heads=3, size=5)
    start = torch.zeros_like(weight), torch.zeros_like(position), torch.ones_like(scale)
    y = pooled(documents, rotates=False)(x, *start)
    torch.testing.assert_close(y, compress_mean(x, NSASpec(8, 4, 8)), rtol=0, atol=1e-14)


def test_blocks_that_are_cut_already_give_the_same() -> None:
    documents = Documents((37,), l=8, d=4)
    x, *parameters = inputs(documents, heads=3, size=5)
    y = pooled(documents, rotates=False)(x, *parameters)
    blocks = x[:, documents.tables()[0]]
    torch.testing.assert_close(pool_blocks(blocks, *parameters), y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_are_float32_and_results_are_rounded_once(dtype: torch.dtype) -> None:
    documents = Documents((40,), l=16, d=8)
    x = inputs(documents, 2, 16, dtype)
    run = pooled(documents, rotates=True)
    actual, exact = with_gradients(run, x), with_gradients(run, [y.double() for y in x])
    rounding = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0
    # The gradient that the test sends back is rounded too.
    for number, (a, b) in enumerate(zip(actual, exact, strict=True)):
        assert a.dtype == dtype
        allowed = rounding if number == 0 else 4 * rounding
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error <= allowed + 64 * torch.finfo(torch.float32).eps


def test_the_op_matches_its_declaration() -> None:
    documents = DOCUMENTS[1]
    x = [y.requires_grad_() for y in inputs(documents, 2, 6, torch.float32)]
    arguments = (*x, *angles(documents, 6), *documents.tables())
    check_declaration(torch_pool, arguments)
    given = (torch_pool(*arguments).detach(), *(a.detach() for a in arguments))
    check_declaration(torch.ops.nsa.pool_backward.default, given)


def test_auto_on_a_cpu_counts_a_fallback_and_a_backend_by_name_none() -> None:
    reset_fallback_counts()
    for backend in ("auto", "blockwise"):
        pooled(DOCUMENTS[0], True, backend)(*inputs(DOCUMENTS[0], 1, 4))
    reason = "tensors are on cpu, and it needs a CUDA device"
    assert fallback_counts() == {("pool", "triton", reason): 1}
    reset_fallback_counts()


@pytest.mark.parametrize(
    ("documents", "size", "reason"),
    [
        (Documents((3,), l=2, d=2), 130, "a head is larger than 128"),
        (Documents((140,), l=129, d=129), 2, "compressed blocks are longer than 128"),
    ],
    ids=["head", "block"],
)
def test_sizes_that_a_program_cannot_hold_fall_back(
    documents: Documents, size: int, reason: str
) -> None:
    reset_fallback_counts()
    x = inputs(documents, 1, size, torch.float32)
    with mock.patch.object(triton_backend, "unsupported_reason", return_value=None):
        y = pooled(documents, False)(*x)
        with pytest.raises(ValueError, match=f"does not support pool: {reason}; use 'auto'"):
            pooled(documents, False, "triton")(*x)
    assert y.shape == (1, len(documents.blocks()), 1, size)
    assert fallback_counts() == {("pool", "triton", reason): 1}
    reset_fallback_counts()


def test_wrong_arguments_raise() -> None:
    documents = DOCUMENTS[0]
    x, weight, position, scale = inputs(documents, 2, 4)
    rest = (None, *documents.tables())
    with pytest.raises(ValueError, match=r"^weight has shape \(1, 4, 4\); it must be \(2, 4, 4\)"):
        pool(x, weight[:1], position, scale, *rest)
    with pytest.raises(ValueError, match=r"^position has shape \(2, 3, 4\); .* be \(2, 4, 4\)"):
        pool(x, weight, position[:, 1:], scale, *rest)
    with pytest.raises(ValueError, match=r"^scale has shape \(4,\); it must be \(8,\)"):
        pool(x, weight, position, scale[:4], *rest)
