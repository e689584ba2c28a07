"""Precision in each dtype, against that of plain PyTorch in the same dtype.

Both are compared with float64 on the same rounded inputs.
"""

from itertools import product

import pytest
import torch

from nsa.ops import nsa_attention
from nsa.spec import NSASpec
from tests.ops.cases import Case, Inputs, all_branches, selection
from tests.ops.triton import gpu_checks
from tests.ops.triton.parity import DEVICE

CASES = [
    Case(NSASpec(8, 4, 16, 3, 1, 1, 40), (260,), group=6, key_dim=16, value_dim=32),
    Case(NSASpec(8, 8, 8, 4, 1, 2, 17), (3, 150, 90), kv_heads=1, group=4, key_dim=32),
]
SMALL = [
    Case(NSASpec(8, 4, 8, 3, 1, 1, 24), (21, 1, 0, 40), kv_heads=1, group=6),
    Case(NSASpec(8, 4, 8, 3, 1, 1, 24), (61,), group=3, key_dim=16, value_dim=8),
]
HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("backend", "case", "dtype"),
    list(product(["reference", "blockwise"], CASES, [torch.float32, *HALF]))
    + [("triton", *pair) for pair in zip(SMALL, HALF, strict=True)],
    ids=str,
)
def test_attention_loses_no_more_than_plain_attention_in_the_same_dtype(
    backend: str, case: Case, dtype: torch.dtype
) -> None:
    if backend == "triton" and DEVICE.type == "cuda":
        pytest.skip("a GPU runs the real sizes, in test_gpu.py")
    gpu_checks.loses_no_more_than_plain_attention(case, dtype, backend)
    gpu_checks.lse_is_nearly_exact(case, dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_the_gated_sum_in_pytorch_keeps_its_inputs_dtype(dtype: torch.dtype) -> None:
    case = CASES[1]
    x, options = Inputs.of(case, dtype), {"cu_seqlens": case.cu_seqlens}
    o = nsa_attention(*x.tensors(), case.spec, **options, backend="blockwise")
    wide = x.to(torch.float64).tensors()
    exact = nsa_attention(*wide, case.spec, **options, backend="reference")
    assert o.dtype == dtype
    assert (o.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_blockwise_is_not_changed_by_autocast() -> None:
    case = CASES[1]
    x = Inputs.of(case, torch.float32)
    block_index = selection(x, case, "blockwise")
    usual = all_branches(x, case, block_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(selection(x, case, "blockwise"), block_index)
        cast = all_branches(x, case, block_index)
    torch.testing.assert_close(usual, cast, rtol=0, atol=0)
