"""Fused module calls: equal to separate calls, and never around a hook or an adapter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nsa.model.fused import add_norm, are_adjacent, parallel_linear
from tests.ops.cases import Calls

WIDTHS = (12, 5, 4)  # their sum, 21, is padded to 24


def linears(dtype: torch.dtype = torch.float64) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(10, width, bias=False, dtype=dtype) for width in WIDTHS]


def rows(count: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, count, 10, dtype=dtype, generator=torch.Generator().manual_seed(1))


def product_widths(recorded: Calls) -> list[int]:
    """The widths of the outputs of matrix products."""
    products = torch.ops.aten.mm, torch.ops.aten.linear
    return [x.shape[-1] for op, _, x in recorded.calls if op.overloadpacket in products]


def test_outputs_and_gradients_are_those_of_separate_calls_with_one_product() -> None:
    modules, x = linears(), rows().requires_grad_()
    with Calls() as recorded:
        fused = parallel_linear(x, modules)
    assert product_widths(recorded) == [24]
    assert fused.shape == (2, 6, 24)
    *outputs, pad = fused.split([*WIDTHS, 3], -1)
    assert not pad.any()
    grad_outputs = [torch.randn_like(output) for output in outputs]
    given = [x, *(module.weight for module in modules)]
    actual = torch.autograd.grad(outputs, given, grad_outputs)
    expected_outputs = [module(x) for module in modules]
    expected = torch.autograd.grad(expected_outputs, given, grad_outputs)
    torch.testing.assert_close((*outputs, *actual), (*expected_outputs, *expected))


def adjacent(modules: list[nn.Linear]) -> list[nn.Linear]:
    """The same weights in one buffer, as ZeRO-1 and 2 keep them; other weights follow."""
    flat = torch.cat([*(module.weight.detach().flatten() for module in modules), torch.ones(40)])
    at = 7  # not the buffer's beginning
    flat = torch.cat([torch.ones(at), flat])
    for module in modules:
        size = module.weight.numel()
        module.weight.data = flat[at : at + size].view_as(module.weight)
        at += size
    return modules


def test_adjacent_weights_are_not_copied_and_give_the_same_bits() -> None:
    results = []
    for modules in (linears(), adjacent(linears())):
        x = rows().requires_grad_()
        with Calls() as recorded:
            fused = parallel_linear(x, modules)
        output = fused[..., :21]
        results.append([output, *torch.autograd.grad(
            output.square().sum(), [x, *(module.weight for module in modules)]
        )])  # fmt: skip
        assert fused.shape == (2, 6, 24)
        assert recorded.names.count("cat") == 2 - len(results)
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("change", ["order", "gap", "end", "storage", "transposed"])
def test_weights_in_another_order_or_with_a_gap_are_not_adjacent(change: str) -> None:
    modules = adjacent(linears())
    weights: list[Tensor] = [module.weight for module in modules]
    assert are_adjacent(weights, 24)
    if change == "order":
        weights.reverse()
    elif change == "gap":
        weights[1] = weights[1][1:]
    elif change == "storage":
        weights[2] = weights[2].clone()
    elif change == "transposed":
        weights = [torch.empty(10, 10).T] * 1
    assert not are_adjacent(weights, 26 if change == "end" else 24)


def hooked(modules: list[nn.Linear]) -> list[nn.Linear]:
    modules[0].register_forward_hook(lambda *_: None)
    return modules


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("place", [list, adjacent, hooked])
@pytest.mark.parametrize("count", [1, 6], ids=["few rows", "many rows"])
def test_detached_linears_train_their_weights_and_not_the_input(
    place: Callable[[list[nn.Linear]], list[nn.Linear]], count: int, autocast: bool
) -> None:
    """Each bias too, where there are any, as in an index's projections."""
    modules, batch = place(linears(torch.float32)), min(count, 2)
    x = rows(count, torch.float32)[:batch].requires_grad_()
    if place is list:
        modules[2].bias = nn.Parameter(torch.ones(4))
    given = [x, *(weight for module in modules for weight in module.parameters())]

    def gradients(outputs: Tensor) -> list[Tensor]:
        return [outputs, *torch.autograd.grad(outputs.square().sum(), given)]

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fused = parallel_linear(x, modules[:1], modules[1:])[..., :21]
        separate = [modules[0](x), *(module(x.detach()) for module in modules[1:])]
    tolerance = {"rtol": 0.02, "atol": 0.02} if autocast else {}
    expected = gradients(torch.cat(separate, -1))
    torch.testing.assert_close(gradients(fused), expected, **tolerance)


def test_few_rows_copy_no_weights() -> None:
    """Decoding reads every weight once per token; a copy would read and write it again."""
    modules = linears()
    with Calls() as recorded:
        output = parallel_linear(rows()[:1, :1], modules)
    assert product_widths(recorded) == [*WIDTHS]
    assert output.shape == (1, 1, 24)


class Adapted(nn.Module):
    """An adapter around a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x.sum(-1, keepdim=True)


class Tripled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


class Doubled(Tensor):
    """A parameter that interprets its own values, as quantized and distributed tensors do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return 2 * func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def replace_forward(module: nn.Linear) -> None:
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]


def subclass_weight(module: nn.Linear) -> None:
    weight = module.weight.detach().as_subclass(Doubled)
    module.weight = nn.Parameter(weight, requires_grad=False)


def add_bias(module: nn.Linear) -> None:
    module.bias = nn.Parameter(torch.ones(module.out_features, dtype=torch.float64))


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {  # in place
    "hook": lambda x: x.register_forward_hook(lambda _, given, output: 2 * output),
    "pre-hook": lambda x: x.register_forward_pre_hook(lambda _, given: (2 * given[0],)),
    "backward hook": lambda x: x.register_full_backward_hook(lambda *args: (2 * args[1][0],)),
    "backward pre-hook": lambda x: x.register_full_backward_pre_hook(
        lambda _, given: (2 * given[0],)
    ),
    "forward": replace_forward,
    "parametrization": lambda x: parametrize.register_parametrization(x, "weight", Tripled()),
    "subclass": subclass_weight,
    "bias": add_bias,
}


@pytest.mark.parametrize("change", ["adapter", *CHANGES])
def test_a_module_that_is_not_plain_is_called(change: str) -> None:
    """Its outputs and the input's gradient are what its own call gives."""
    modules: list[Any] = [*linears()]
    plain_x, x, separate_x = (rows().requires_grad_() for _ in range(3))
    plain = parallel_linear(plain_x, modules)
    plain.sum().backward()
    if change == "adapter":
        modules[1] = Adapted(modules[1])
    else:
        CHANGES[change](modules[1])
    fused = parallel_linear(x, modules)
    separate = torch.cat([module(separate_x) for module in modules], -1)
    torch.testing.assert_close(fused[..., :21], separate)
    for output in (fused, separate):
        output.sum().backward()
    torch.testing.assert_close(x.grad, separate_x.grad)
    assert not (torch.equal(fused, plain) and torch.equal(x.grad, plain_x.grad))


def test_a_hook_on_all_modules_is_called_for_each() -> None:
    called: list[nn.Module] = []
    modules = linears()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, given, output: called.append(module)
    )
    try:
        parallel_linear(rows(), modules)
    finally:
        hook.remove()
    assert called == modules


def test_biases_of_some_linears_are_added_even_if_they_are_frozen() -> None:
    modules, x = linears(), rows()
    modules[1].bias = nn.Parameter(torch.randn(5, dtype=x.dtype), requires_grad=False)
    expected = torch.cat([module(x) for module in modules], -1)
    torch.testing.assert_close(parallel_linear(x, modules)[..., :21], expected)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("kind", ["plain", "hooked", "no weight"])
def test_add_norm_is_the_sum_and_its_norm(delta: bool, kind: str) -> None:
    x, added = rows().unbind(0)
    affine = kind != "no weight"
    norm = nn.RMSNorm(10, eps=1e-3, elementwise_affine=affine, dtype=torch.float64)
    for weight in norm.parameters():
        nn.init.normal_(weight)
    if kind == "hooked":
        norm.register_forward_hook(lambda _, given, output: 2 * output)
    total = x + added if delta else x
    actual = add_norm(x, added if delta else None, norm)
    torch.testing.assert_close(actual, (total, norm(total)))


def test_a_norm_without_an_epsilon_takes_pytorchs_on_a_gpu_too() -> None:
    norm, x = nn.RMSNorm(10, device="meta"), rows(6, torch.float32).to("meta")  # counts as a GPU
    assert add_norm(x, None, norm)[1].shape == x.shape
