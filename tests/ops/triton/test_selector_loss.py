"""Kernels of the selector loss: parity with PyTorch, precision, same bits, launches and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa.ops import NSASpec, selector_loss
from nsa.ops.triton.configs import Config, override_choices
from nsa.ops.triton.launch import Launch, recording
from nsa.ops.triton.selector_loss import (
    selector_loss_backward,
    selector_loss_forward,
    triton_selector_loss,
)
from tests.ops.cases import Case, Inputs, check_declaration, default
from tests.ops.selector import PATTERNS, RANDOM, results, sampled
from tests.ops.test_selector import declared
from tests.ops.triton.parity import DEVICE, RULE, assert_exact_enough, inputs

PACKED = PATTERNS["packed"]
CASES = [*PATTERNS.values(), *RANDOM]
M7C = Case(NSASpec(), (2048,), batch=8, kv_heads=2, group=6, key_dim=64, value_dim=64)


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Several tiles of rows and keys, and a block in several steps."""
    with override_choices(lambda *_: Config(16, 16, 4, 1)):
        yield


def assert_selector_parity(case: Case, queries: Tensor | None = None, heads: int = 0) -> None:
    assert_exact_enough(
        *(results(case, backend, inputs(case, dtype), queries, heads) for backend, dtype in RULE)
    )


@pytest.mark.parametrize("case", default(10, CASES), ids=str)
def test_loss_target_and_gradient_are_those_of_pytorch(case: Case) -> None:
    assert_selector_parity(case)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", default(3, ["packed", "batch", "large blocks", *PATTERNS]))
def test_tiles_of_any_size_give_the_results_of_pytorch(name: str) -> None:
    assert_selector_parity(PATTERNS[name])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", ["packed", "batch", "odd sizes"])
def test_queries_of_their_own_give_the_results_of_pytorch(name: str, heads: int) -> None:
    assert_selector_parity(PATTERNS[name], heads=heads)


@pytest.mark.parametrize("group", default(3, [5, 1, 16, 2, 7, 40]))
def test_any_number_of_heads_may_share_keys(group: int) -> None:
    assert_selector_parity(replace(PACKED, kv_heads=2 if group < 8 else 1, group=group))


@pytest.mark.parametrize("queries", [[0], [83], [40, 41, 42, 83], list(range(85))], ids=str)
def test_any_tokens_may_be_the_sample(queries: list[int]) -> None:
    assert_selector_parity(replace(PACKED, batch=1), torch.tensor(queries))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_loses_a_few_roundings(dtype: torch.dtype) -> None:
    """The loss is of the same inputs; the gradient is a product of rounded numbers."""
    x = inputs(PACKED, dtype)
    loss, target, gradient = results(PACKED, "triton", x)
    exact = results(PACKED, "reference", x.to(torch.float64))
    assert loss.dtype == target.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(target.double(), exact[1], rtol=1e-5, atol=1e-6)
    rounding = 2 * torch.finfo(dtype).eps * float(exact[2].abs().max())
    assert float((gradient.double() - exact[2]).abs().max()) < rounding


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what NumPy says of -inf
def test_large_scores_neither_overflow_nor_underflow() -> None:
    x = inputs(PACKED)
    for y in (x.q, x.k_cmp, x.k_sel):
        y *= 8
    both = [results(PACKED, name, x.to(dtype)) for name, dtype in RULE]
    assert all(bool(y.isfinite().all()) for y in both[0])
    assert float(both[2][0]) > 1
    torch.testing.assert_close(both[0][0].double(), both[2][0], rtol=1e-4, atol=0)


def test_three_runs_give_the_same_bits() -> None:
    x = inputs(PACKED)
    first = results(PACKED, "triton", x)
    for _ in range(2):
        assert all(map(torch.equal, results(PACKED, "triton", x), first))


def test_inputs_may_be_laid_out_in_any_way() -> None:
    x = inputs(PACKED)
    spread = Inputs(
        *(y.transpose(1, 2).contiguous().transpose(1, 2) for y in x.tensors()[:-1]), x.gates
    )
    assert all(map(torch.equal, results(PACKED, "triton", spread), results(PACKED, "triton", x)))


def test_the_gradient_of_a_small_loss_survives_half_precision() -> None:
    """A mean over many queries, scaled by fp16's loss scale: neither of them alone underflows."""

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        x = inputs(PACKED, torch.float16).to(dtype)
        k, queries = x.k_cmp.requires_grad_(), sampled(PACKED).to(DEVICE)
        options = {"cu_seqlens": PACKED.offsets_on(DEVICE), "backend": backend}
        loss, _ = selector_loss(x.q, k, x.k_sel, queries, PACKED.spec, **options)
        return torch.autograd.grad((loss * 1e-7).double() * 2.0**16, k)[0].double()

    exact = gradient(torch.float64, "reference")
    error = (gradient(torch.float16, "triton") - exact).abs().max()
    assert float(error) < 0.005 * float(exact.abs().max())


@pytest.mark.parametrize(("name", "own"), [("packed", False), ("batch", True)])
def test_the_op_matches_its_declaration(name: str, own: bool) -> None:
    case = PATTERNS[name]
    x = declared(case, inputs(case))
    if own:
        x = x._replace(q_cmp=x.q[:, :, : case.kv_heads].clone().requires_grad_())
    arguments = (x.k_cmp.requires_grad_(), *x[1:6], x.spec.to_ints(), x.scale)
    check_declaration(triton_selector_loss, arguments)
    loss, _, dp, by_head = triton_selector_loss(*arguments)
    backward = torch.ops.nsa.triton_selector_loss_backward.default
    given = (torch.ones_like(loss), *arguments, dp, by_head)
    check_declaration(backward, given)


def recorded(case: Case, queries: int) -> list[Launch]:
    """Launches of both passes on `meta`, whose tensors have no values to wait for."""
    x = declared(
        case, Inputs(*(torch.empty_like(y, device="meta") for y in inputs(case).tensors()))
    )
    cu = None if x.cu_seqlens is None else x.cu_seqlens.to("meta")
    x = x._replace(queries=torch.empty(queries, dtype=torch.int64, device="meta"), cu_seqlens=cu)
    with recording() as launches:
        loss, _, dp, by_head = selector_loss_forward(x)
        selector_loss_backward(loss, x, dp, by_head)
    return launches


@pytest.mark.parametrize("name", ["packed", "batch"])
def test_launches_are_few_and_wait_for_no_value(name: str) -> None:
    names = [launch.kernel.fn.__name__ for launch in recorded(PATTERNS[name], 32)]
    assert names == ["mass_kernel", "mass_kernel", "divergence_kernel", "keys_kernel"]


def test_no_tensor_has_a_number_per_query_and_key() -> None:
    """The largest beside the inputs has one per query, head and block of 64 keys."""
    launches = recorded(M7C, 32)
    inputs_of_op = {"q", "k_sel", "k_cmp", "dk"}
    sizes = {
        name: x.numel()
        for launch in launches
        for name, x in launch.arguments.items()
        if isinstance(x, Tensor) and name not in inputs_of_op
    }
    assert max(sizes.values()) == sizes["mass"] == 8 * 12 * 32 * 2048 // 64
