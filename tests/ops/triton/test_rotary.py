"""Kernels of rotary_pool: parity with PyTorch, declarations of the op, and its launches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from nsa.ops import PackedLayout
from nsa.ops.inputs import RotaryPoolInputs
from nsa.ops.triton.launch import recording
from nsa.ops.triton.rotary import (
    rotary_pool_backward,
    rotary_pool_forward,
    triton_rotary_pool,
)
from tests.ops.cases import check_declaration, with_gradients
from tests.ops.projections import DOCUMENTS, LAYOUTS, Documents, computed
from tests.ops.triton.parity import DEVICE, RULE, assert_exact_enough

ALL = LAYOUTS["all branches"]
# Several tiles of tokens with a partial last one, blocks longer than a step, and real head sizes.
LARGE = {
    "blocks": (PackedLayout(3, 1, 64, 32, 1, 3, mean=True), Documents((45,), l=33, d=16)),
    "heads": (PackedLayout(2, 2, 16, 24, 2, 2, pre_rope=True), Documents((40, 0, 3), l=8, d=4)),
    "tiles": (ALL, Documents((31, 1, 0, 33), l=7, d=2)),
}
CASES = LARGE | {
    f"{name}, {i}": (layout, documents)
    for name, layout in LAYOUTS.items()
    for i, documents in enumerate(DOCUMENTS[:3])
}


def results(
    layout: PackedLayout, documents: Documents, backend: str, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Outputs, and the gradient of the projection."""
    x = documents.packed(layout, torch.float32).to(DEVICE, dtype)
    run = partial(computed, layout=layout, documents=documents, backend=backend)
    return with_gradients(run, [x])


def assert_rotary_pool_parity(layout: PackedLayout, documents: Documents) -> None:
    assert_exact_enough(*(results(layout, documents, backend, dtype) for backend, dtype in RULE))


@pytest.mark.parametrize(("layout", "documents"), CASES.values(), ids=CASES)
def test_results_and_gradients_are_those_of_pytorch(
    layout: PackedLayout, documents: Documents
) -> None:
    """Uninitialised memory is NaN here, so every column must be written."""
    assert_rotary_pool_parity(layout, documents)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    documents = Documents((21,), l=8, d=4)
    x = documents.packed(ALL, dtype).to(DEVICE)
    actual = computed(x, ALL, documents, "triton")
    exact = computed(x.double(), ALL, documents)
    for a, b in zip(actual, exact, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_three_runs_give_the_same_bits() -> None:
    first = results(ALL, DOCUMENTS[1], "triton")
    for _ in range(2):
        torch.testing.assert_close(results(ALL, DOCUMENTS[1], "triton"), first, rtol=0, atol=0)


def test_a_projection_may_be_laid_out_in_any_way() -> None:
    documents = DOCUMENTS[0]
    x = documents.packed(ALL, torch.float32).to(DEVICE)
    spread = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(
        *(computed(y, ALL, documents, "triton") for y in (spread, x)), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ["all branches", "mlp, shared", "dense"])
def test_the_ops_match_their_declarations(name: str) -> None:
    """Schema, autograd, and the shapes, dtypes and strides of what comes out."""
    layout, documents = LAYOUTS[name], DOCUMENTS[1]
    x = documents.packed(layout, torch.float32).to(DEVICE)
    tables = (y.to(DEVICE) for y in (*documents.angles(layout), *documents.tables()))
    rest = (*tables, [int(number) for number in layout])
    forward = (x.clone().requires_grad_(), *rest)
    check_declaration(triton_rotary_pool, forward)
    outputs = triton_rotary_pool(x, *rest)
    backward = torch.ops.nsa.triton_rotary_pool_backward.default
    given = (*outputs, x, *rest, outputs[1])
    check_declaration(backward, given)


@pytest.mark.parametrize("documents", DOCUMENTS[:3], ids=str)
def test_launches_are_few_and_wait_for_no_value(documents: Documents) -> None:
    """Tensors of the `meta` device have none: reading one raises."""
    x = documents.packed(ALL, torch.float32).to("meta")
    tables = (y.to("meta") for y in (*documents.angles(ALL), *documents.tables()))
    inputs = RotaryPoolInputs(x, *tables, list(ALL))
    with recording() as launches:
        outputs = rotary_pool_forward(inputs)
        rotary_pool_backward(*outputs, inputs, outputs[1])
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "rotary_kernel",
        "pool_kernel",
        "rotary_backward_kernel",
    ]
