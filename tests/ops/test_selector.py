"""The selector loss in PyTorch: equals its definition, refuses bad arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.ops import NSASpec, selector, selector_loss
from nsa.ops.inputs import SelectorInputs
from nsa.ops.selector import torch_selector_loss
from tests.ops.cases import Case, Inputs, check_declaration, default
from tests.ops.selector import PATTERNS, RANDOM, results, sampled

CASES = [*PATTERNS.values(), *RANDOM]
PACKED = PATTERNS["packed"]


@pytest.mark.parametrize("case", default(18, CASES), ids=str)
def test_loss_and_gradient_are_those_of_the_definition(case: Case) -> None:
    x = Inputs.of(case)
    actual, expected = (results(case, name, x) for name in ("blockwise", "definition"))
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["packed", "batch", "odd sizes", "some queries without"])
def test_queries_of_their_own_rank_blocks_and_get_a_gradient(name: str, heads: int) -> None:
    case = PATTERNS[name]
    x = Inputs.of(case)
    actual, expected = (
        results(case, backend, x, heads=heads) for backend in ("blockwise", "definition")
    )
    assert len(actual) == 4
    assert actual[3].any()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    with_q = results(case, "blockwise", x)
    torch.testing.assert_close(actual[1], with_q[1])  # the target is attention's
    assert not torch.allclose(actual[0], with_q[0])


def test_only_compressed_keys_get_a_gradient() -> None:
    x = Inputs.of(PACKED)
    given = [y.requires_grad_() for y in (x.q, x.k_cmp, x.k_sel)]
    loss, target = selector_loss(*given, sampled(PACKED), PACKED.spec, cu_seqlens=PACKED.cu_seqlens)
    loss.backward()
    assert [y.grad is not None for y in given] == [False, True, False]
    assert not target.requires_grad


def test_the_target_is_the_attention_of_ranked_blocks() -> None:
    """Equal selected keys give each position the same weight."""
    case = Case(NSASpec(8, 4, 8, 3, 1, 1, 16), (41,))
    x = Inputs.of(case)
    x.k_sel.zero_()
    target = selector_loss(x.q, x.k_cmp, x.k_sel, torch.tensor([7, 40]), case.spec)[1]
    assert target.shape == (1, 2, 2, 6)
    assert not target[:, :, 0].any()
    expected = torch.tensor([0, 8, 8, 8, 8, 0], dtype=torch.float64) / 41
    torch.testing.assert_close(target[:, :, 1], expected.expand(1, 2, 6))


def test_few_scores_at_a_time_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs.of(PACKED)
    at_once = results(PACKED, "blockwise", x)
    monkeypatch.setattr(selector, "SCORES", 1)
    torch.testing.assert_close(results(PACKED, "blockwise", x), at_once, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_computes_in_float32_and_rounds_the_gradient_once(
    dtype: torch.dtype,
) -> None:
    x = Inputs.of(PACKED, dtype)
    loss, target, gradient = results(PACKED, "blockwise", x)
    assert loss.dtype == target.dtype == torch.float32
    assert gradient.dtype == dtype
    exact = results(PACKED, "blockwise", x.to(torch.float64))
    torch.testing.assert_close(loss.double(), exact[0])
    torch.testing.assert_close(gradient, exact[2].to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def declared(case: Case, x: Inputs) -> SelectorInputs:
    queries = sampled(case)
    return SelectorInputs(
        x.k_cmp, None, x.q, x.k_sel, queries, case.cu_seqlens, case.spec, case.scale
    )


def test_the_op_matches_its_declaration() -> None:
    x = declared(PACKED, Inputs.of(PACKED))
    arguments = (x.k_cmp.requires_grad_(), *x[1:6], x.spec.to_ints(), x.scale)
    check_declaration(torch_selector_loss, arguments)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (torch.arange(3, dtype=torch.int32), r"queries is torch.int32 \(3,\); it must be int64"),
        (torch.zeros(2, 2, dtype=torch.int64), r"queries is torch.int64 \(2, 2\)"),
        (torch.arange(0), r"queries is torch.int64 \(0,\)"),
    ],
)
def test_queries_are_a_list_of_tokens(queries: Tensor, message: str) -> None:
    x = Inputs.of(PACKED)
    with pytest.raises(ValueError, match=message):
        selector_loss(x.q, x.k_cmp, x.k_sel, queries, PACKED.spec, cu_seqlens=PACKED.cu_seqlens)


def test_keys_of_another_length_are_refused() -> None:
    x = Inputs.of(PACKED)
    options = {"cu_seqlens": PACKED.cu_seqlens}
    with pytest.raises(ValueError, match="k_sel has length 84; q requires 85"):
        selector_loss(x.q, x.k_cmp, x.k_sel[:, 1:], sampled(PACKED), PACKED.spec, **options)
    with pytest.raises(ValueError, match="k_cmp has length"):
        selector_loss(x.q, x.k_cmp[:, 1:], x.k_sel, sampled(PACKED), PACKED.spec, **options)
