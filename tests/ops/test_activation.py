"""SwiGLU in PyTorch: its definition, padding, and arguments that raise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import fallback_counts, reset_fallback_counts, swiglu
from tests.ops.cases import with_gradients


def packed(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 3 * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def defined(width: int, gate_up: Tensor) -> Tensor:
    gate, up, _ = gate_up.split([width, width, gate_up.shape[-1] - 2 * width], -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(("columns", "width"), [(10, 5), (16, 5), (2, 1)])
def test_result_and_gradient_are_those_of_the_definition(columns: int, width: int) -> None:
    x = packed(2, 3, columns)
    actual = with_gradients(partial(swiglu, width=width), [x])
    expected = with_gradients(partial(defined, width), [x])
    torch.testing.assert_close(actual, expected)
    assert not actual[1][..., 2 * width :].any()


def test_bf16_rounds_as_separate_pytorch_operations_do() -> None:
    x = packed(4, 10, dtype=torch.bfloat16)
    for a, b in zip(
        with_gradients(swiglu, [x]), with_gradients(partial(defined, 5), [x]), strict=True
    ):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b)


def test_auto_on_a_cpu_counts_a_fallback_and_a_backend_by_name_none() -> None:
    reset_fallback_counts()
    swiglu(packed(1, 4))
    swiglu(packed(1, 4), backend="blockwise")
    reason = "tensors are on cpu, and it needs a CUDA device"
    assert fallback_counts() == {("swiglu", "triton", reason): 1}
    reset_fallback_counts()


@pytest.mark.parametrize(
    ("x", "width", "backend", "message"),
    [
        (packed(2, 9), None, "auto", r"^width = None: gate_up has 9 columns; pass a width"),
        (packed(2, 9), 5, "auto", r"^width = 5: gate_up has 9 columns"),
        (packed(2, 8), 0, "auto", r"^width = 0: gate_up has 8 columns"),
        (packed(2, 8), None, "triton", r"'triton' does not support swiglu: it has no float64"),
        (packed(2, 8), None, "cuda", r"^backend = 'cuda': choose one of"),
        (torch.ones(2, 8, dtype=torch.int64), None, "auto", r"^swiglu: its input has dtype"),
    ],
)
def test_wrong_arguments_raise(x: Tensor, width: int | None, backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu(x, width, backend=backend)
