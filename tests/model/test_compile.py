"""`compile_blocks`: the same numbers and names as eager, and few compilations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from nsa.model import LanguageModel
from nsa.model.block import compile_blocks
from nsa.monitor.environment import DtypeReport
from tests.model import models
from tests.model.models import build, packed, tiny, tokens

LENGTH = 40
# Every mode that compiles, and every attention, with one block where a second one shows nothing
# more; packed documents below are mean and reentrant.
CASES: list[Any] = [("pool", "none", 2), ("mean", "non_reentrant", 1), ("mean", "deepspeed", 1)]
CASES += [("mlp", "reentrant", 1), ("dense", "none", 1), ("index", "none", 1)]
MORE = [("mean", "none", 2), ("mean", "reentrant", 2), ("mean", "deepspeed", 2)]
CASES += [pytest.param(*case, marks=pytest.mark.full) for case in MORE]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def twins(
    backend: Any, attention: str = "mean", dtype: torch.dtype = torch.float64, **changes: Any
) -> tuple[LanguageModel, LanguageModel]:
    """A compiled model and an eager one with the same weights."""
    config = tiny(attention, **changes)
    compiled, eager = (build(config, dtype) for _ in range(2))
    compile_blocks(compiled, backend)
    return compiled, eager


def step(model: LanguageModel, seed: int, cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """The loss and all gradients."""
    loss, gradients = models.step(model, tokens(LENGTH, seed=seed), cu_seqlens)
    return [loss, *gradients.values()]


@pytest.mark.parametrize(("attention", "mode", "layers"), CASES)
def test_compiled_blocks_give_the_eager_loss_and_gradients(
    attention: str, mode: str, layers: int
) -> None:
    changes = {"activation_checkpointing": mode, "layers": layers}
    compiled, eager = twins("aot_eager", attention, **changes)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    results = [step(model, 1) for model in (compiled, eager)]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)]
)
def test_generated_code_is_as_precise_as_eager(dtype: torch.dtype) -> None:
    """Inductor's C++ kernels; bounded by what eager loses in the same dtype against float64."""
    compiled, eager = twins("inductor", dtype=dtype, layers=1, activation_checkpointing="none")
    exact = build(compiled.config)
    exact.load_state_dict(eager.state_dict())
    results = zip(*(step(model, 1) for model in (compiled, eager, exact)), strict=True)
    for actual, rounded, expected in results:
        lost = (rounded.double() - expected).norm() + torch.finfo(dtype).eps * expected.norm()
        assert (actual.double() - expected).norm() <= 3 * lost


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_packed_documents_of_any_number_and_length_compile_twice_and_never_again(
    layers: int,
) -> None:
    """Once for the first lengths, once for any; each for the first block and the others, without
    gradients and with them."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled, eager = twins(counter, activation_checkpointing="reentrant", layers=layers)
    batches = [(9, 31), (20, 7, 13), (5, 5, 5, 25), (11, 29), (30, 1, 2, 3, 4), (17, 10, 13)]
    counts = []
    for seed, lengths in enumerate(batches):
        results = [step(model, seed, packed(*lengths)) for model in (compiled, eager)]
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        counts.append(counter.frame_count)
    assert counts[1] <= 4 * layers
    assert counts[2:] == counts[1:2] * 4


def test_the_observer_receives_what_it_receives_in_eager_mode() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    models = twins(counter)
    seen: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for model, calls in zip(models, seen, strict=True):
        step(model, 1)
        for layer in model.sparse_layers().values():
            layer.observer = lambda gates, blocks, *_, calls=calls: calls.append((gates, blocks))
        step(model, 2)
        for layer in model.sparse_layers().values():
            layer.observer = None
        step(model, 3)
    assert [len(calls) for calls in seen] == [2, 2]  # layers
    for (gates, blocks), (eager_gates, eager_blocks) in zip(*seen, strict=True):
        torch.testing.assert_close(gates, eager_gates.detach(), rtol=1e-10, atol=1e-12)
        assert torch.equal(blocks, eager_blocks)
        assert not gates.requires_grad
    assert counter.frame_count == 2  # the first layer and the others, observed or not
    assert all(layer.observed is None for layer in models[0].sparse_layers().values())


def test_the_dtype_report_of_the_first_step_changes_no_number() -> None:
    model = {"dtype": torch.bfloat16, "layers": 1, "activation_checkpointing": "none"}
    compiled, plain = (twins("aot_eager", **model)[0] for _ in range(2))
    DtypeReport(compiled)
    for actual, expected in zip(step(compiled, 1), step(plain, 1), strict=True):
        assert torch.equal(actual, expected)
