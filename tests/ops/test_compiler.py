"""Custom ops of `blockwise`: declarations match, and calls compile as one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.ops import blockwise, compressed_attention, nsa_attention
from nsa.spec import NSASpec
from tests.ops.cases import Case, Inputs, check_declaration, default, selection, with_gradients

SPEC = NSASpec(4, 2, 3, 2, 0, 1, 5)
PATTERN = SPEC.to_ints()
CASES = [
    Case(SPEC, (20,), batch=2, group=3, value_dim=5),
    Case(SPEC, (20,), kv_heads=1, group=2),
    Case(SPEC, (20,), kv_heads=3, group=1),
    Case(SPEC, (9, 2, 0, 9), group=2),
    Case(SPEC, (2,)),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def check_declarations(inputs: tuple[Tensor, ...], *static: Any) -> None:
    """Schema, autograd and the shapes, dtypes and strides of what comes out, both ways."""
    forward = (*(x.detach().requires_grad_() for x in inputs), *static)
    check_declaration(blockwise.blockwise_attention, forward)
    o, lse = blockwise.blockwise_attention(*inputs, *static)
    backward = (torch.ones_like(o), torch.ones_like(lse), *inputs, *static, o, lse)
    backward_op = torch.ops.nsa.blockwise_attention_backward.default
    check_declaration(backward_op, backward)


@cases
@pytest.mark.parametrize("branch", ["compressed", "selected", "window"])
def test_attention_ops_match_their_declaration(case: Case, branch: str) -> None:
    x = Inputs.of(case, torch.float32)
    keys = {"compressed": (x.k_cmp, x.v_cmp), "selected": (x.k_sel, x.v_sel)}
    index = selection(x, case, "blockwise") if branch == "selected" else None
    static = (index, case.cu_seqlens, branch, PATTERN, case.scale)
    check_declarations((x.q, *keys.get(branch, (x.k_win, x.v_win))), *static)


def test_attention_ops_match_their_declaration_for_inputs_laid_out_by_head() -> None:
    """Queries and keys that are [B, H, T, D] in memory, as PyTorch's attention takes them."""
    x = Inputs.of(CASES[0], torch.float32)
    inputs = tuple(y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x.q, x.k_win, x.v_win))
    check_declarations(inputs, None, None, "window", PATTERN, CASES[0].scale)


@cases
def test_the_selection_op_matches_its_declaration(case: Case) -> None:
    x = Inputs.of(case, torch.float32)
    options = {"cu_seqlens": case.cu_seqlens, "backend": "blockwise"}
    _, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, SPEC, **options)
    check_declaration(
        blockwise.blockwise_select_blocks,
        (x.q, x.k_cmp, lse, case.cu_seqlens, PATTERN, case.seq_len, case.scale),
    )


@pytest.mark.parametrize("case", default(1, CASES[3::-3]), ids=str)
def test_the_gated_sum_compiles_as_one_graph_with_the_same_results(case: Case) -> None:
    x = Inputs.of(case, torch.float32)

    def mixed(*inputs: Tensor) -> Tensor:
        return nsa_attention(*inputs, SPEC, cu_seqlens=case.cu_seqlens)

    compiled = torch.compile(mixed, backend="aot_eager", fullgraph=True)
    actual, expected = (with_gradients(f, x.tensors()) for f in (compiled, mixed))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_private_names_are_those_of_the_versions_of_torch_that_the_project_allows() -> None:
    """custom_op.py registers ops by private names, which a version may change.

    To allow another: compare its torch/_library/custom_ops.py with custom_op.py first.
    """
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert '"torch>=2.8,<2.14"' in pyproject.read_text()
    assert (2, 8) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
