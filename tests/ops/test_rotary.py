"""rotary_pool in PyTorch: its definition, gradients, dtypes, and arguments that raise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from nsa.ops import PackedLayout, fallback_counts, reset_fallback_counts, rotary_pool
from nsa.ops.rotary import torch_rotary_pool
from tests.ops.cases import check_declaration, with_gradients
from tests.ops.projections import DOCUMENTS, LAYOUTS, Documents, computed, defined

ALL = LAYOUTS["all branches"]
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
documents = pytest.mark.parametrize("documents", DOCUMENTS, ids=str)


@layouts
@documents
def test_outputs_and_gradients_are_those_of_the_definition(
    layout: PackedLayout, documents: Documents
) -> None:
    """Uninitialised memory is NaN here, so every column must be written."""
    x = documents.packed(layout)
    actual, expected = (
        with_gradients(partial(f, layout=layout, documents=documents), [x])
        for f in (computed, defined)
    )
    for a, b in zip(actual, expected, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert not actual[-1][..., sum(layout.columns) :].any(), "padding has no gradient"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_are_float32_and_results_are_rounded_once(dtype: torch.dtype) -> None:
    documents = Documents((40,), l=16, d=8)
    x = documents.packed(ALL, dtype)
    actual, exact = (computed(y, ALL, documents) for y in (x, x.double()))
    step = 2 * torch.finfo(torch.float32).eps
    rounding = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0
    for a, b in zip(actual, exact, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=rounding + step, atol=8 * step)


def test_a_projection_may_be_laid_out_in_any_way() -> None:
    x = DOCUMENTS[0].packed(ALL)
    by_column = x.transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(*(computed(y, ALL, DOCUMENTS[0]) for y in (by_column, x)), strict=True):
        assert a.is_contiguous()
        assert torch.equal(a, b)


def test_the_projection_is_not_saved_for_the_backward_pass() -> None:
    documents = DOCUMENTS[0]
    x = documents.packed(ALL).requires_grad_()
    projection = x * 1
    saved_storages: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        saved_storages.append(saved.untyped_storage().data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        computed(projection, ALL, documents)
    assert saved_storages
    assert projection.untyped_storage().data_ptr() not in saved_storages


@pytest.mark.parametrize("name", ["all branches", "mlp, shared"])
def test_the_op_matches_its_declaration(name: str) -> None:
    layout, documents = LAYOUTS[name], DOCUMENTS[1]
    x = documents.packed(layout).float().requires_grad_()
    inputs = (x, *documents.angles(layout), *documents.tables(), [int(n) for n in layout])
    check_declaration(torch_rotary_pool, inputs)
    outputs = torch_rotary_pool(*inputs)
    given = (*(y.detach() for y in outputs), x.detach(), *inputs[1:], outputs[1].detach())
    backward = torch.ops.nsa.rotary_pool_backward.default
    check_declaration(backward, given)


def test_auto_on_a_cpu_counts_a_fallback_and_a_backend_by_name_none() -> None:
    reset_fallback_counts()
    for backend in ("auto", "blockwise"):
        computed(DOCUMENTS[0].packed(ALL), ALL, DOCUMENTS[0], backend)
    reason = "tensors are on cpu, and it needs a CUDA device"
    assert fallback_counts() == {("rotary_pool", "triton", reason): 1}
    reset_fallback_counts()


def test_wrong_arguments_raise() -> None:
    documents = DOCUMENTS[0]
    x, (cos, sin) = documents.packed(ALL), documents.angles(ALL)
    tables = documents.tables()
    with pytest.raises(ValueError, match=r"^packed has shape \(2, 11, 99\); .* with P >= 102$"):
        rotary_pool(x[..., :99], ALL, cos, sin, *tables)
    with pytest.raises(ValueError, match=r"^cos has shape \(10, 1, 3\); it must be \(11, 1, 3\)"):
        rotary_pool(x, ALL, cos[1:], sin[1:], *tables)
    with pytest.raises(ValueError, match=r"^layout.mean requires block_tokens and token_blocks"):
        rotary_pool(x, ALL, cos, sin, tables[0])
    with pytest.raises(ValueError, match=r"^sin has shape \(10, 1, 3\); it must be \(11, 1, 3\)"):
        rotary_pool(x, ALL, cos, sin[1:], *tables)
    with pytest.raises(ValueError, match=r"^token_blocks has 10 rows; it must have T = 11$"):
        rotary_pool(x, ALL, cos, sin, tables[0], tables[1][1:])
    with pytest.raises(ValueError, match=r"^layout.mean and layout.pre_rope exclude each other"):
        rotary_pool(x, ALL._replace(mean=True, pre_rope=True), cos, sin, *tables)
    four = torch.zeros(2, 11, sum(ALL._replace(kv_sets=4).columns), dtype=x.dtype)
    with pytest.raises(ValueError, match=r"^layout.kv_sets = 4: must be 1 to 3$"):
        rotary_pool(four, ALL._replace(kv_sets=4), cos, sin, *tables)
