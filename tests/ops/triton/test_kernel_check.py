"""The kernel check: right kernels pass, planted faults are named, `auto` falls back."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.model import AttentionConfig, ModelConfig
from nsa.model import kernel_check as checks
from nsa.model.kernel_check import KernelResult, check_kernels, problems_of
from nsa.ops import nsa_attention, triton
from nsa.ops.backend import disable, dispatch, fallback_counts, reset_fallback_counts
from nsa.ops.per_token import swiglu
from nsa.ops.triton import band, decode, per_token, select
from nsa.ops.triton.selected import DENSE_BLOCKS
from nsa.spec import NSASpec
from tests.inputs import Inputs
from tests.kernel_launches import recording
from tests.model.models import SPEC, tiny
from tests.ops import m7c_kernels
from tests.ops.cases import Calls, Case, default
from tests.ops.m7c_kernels import table
from tests.ops.triton.parity import DEVICE

ATTENTION = AttentionConfig(spec=SPEC, compressor="pool", selector_loss=1.0)
CONFIG = tiny(ATTENTION, layers=1, heads=2, kv_heads=1, head_dim=8, value_dim=6)
INDEXED = replace(
    CONFIG,
    heads=4,
    kv_heads=2,
    attention=replace(ATTENTION, branches="sel", spec=replace(SPEC, window=NSASpec.window)),
)
ALL = {"add_rms_norm", "swiglu", "cross_entropy", "rotary_pool", "pool"}
ALL |= {"nsa_attention", "selector_loss"}


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    """No operation stays disabled."""
    yield
    disable({})


@pytest.mark.parametrize("packed", default(1, [True, False]))
@pytest.mark.parametrize("dtype", default(1, [torch.bfloat16, torch.float32, torch.float16]))
def test_the_kernels_of_a_run_pass(dtype: torch.dtype, packed: bool) -> None:
    start = time.perf_counter()
    results = check_kernels(CONFIG, dtype, DEVICE, packed)
    assert sum(result.seconds for result in results) <= time.perf_counter() - start
    assert [result.problem for result in results] == [""] * len(results), table(results)
    names = Counter(result.operation for result in results)
    # Without and with a residual; keys and values.
    assert names == Counter([*ALL, "add_rms_norm", "pool"])
    assert all(result.error <= result.allowed for result in results)
    assert problems_of([results, results]) == {}


@pytest.mark.parametrize("packed", default(1, [True, False]))
def test_the_kernels_of_a_run_with_an_index_pass(packed: bool) -> None:
    with recording(dry=False) as launches:
        results = check_kernels(INDEXED, torch.float32, DEVICE, packed)
    assert "queries_kernel" in {launch.kernel.fn.__name__ for launch in launches}, "of the index"
    offsets = [launch.arguments["cu"] for launch in launches if "cu" in launch.arguments]
    assert {cu is not None for cu in offsets} == {packed}
    assert [result.problem for result in results] == [""] * len(results), table(results)
    names = [result.operation for result in results]
    expected = ALL - {"nsa_attention"} | {"select_blocks", "selected_attention"}
    assert set(names) == expected
    assert names.count("rotary_pool") == 1, "the layer's projection has the index's columns too"
    assert names.count("pool") == 1, "keys alone"


def test_blocks_that_an_index_does_not_rank_best_are_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = select.triton_select

    def other_blocks(*args: Any) -> Tensor:
        """The second best block of a query, where it has a free one."""
        index = right(*args)
        last = index.max(-1).values
        free = (last > 4) & ~(index == 2).any(-1)
        return torch.where(free[..., None] & (index == 3), 2, index).sort(-1).values

    monkeypatch.setattr(select, "triton_select", other_blocks)
    assert only("select_blocks", INDEXED).problem.startswith("its error is")


def only(name: str, config: ModelConfig = CONFIG) -> KernelResult:
    """Check one operation of packed documents, in bfloat16."""
    operations = checks.operations(config, DEVICE, True)
    operation = next(x for x in operations if x.name == name)
    return checks.check(operation, torch.bfloat16)


Fault = Callable[[Callable[..., Any]], Callable[..., Any]]


def changed(change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda kernel: lambda *args: change(kernel(*args))


def unsteady(kernel: Callable[..., Any]) -> Callable[..., Any]:
    calls = count()
    return lambda *args, **options: kernel(*args, **options) * (1 + next(calls) / 256)


def raising(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        raise RuntimeError("CUDA error: misaligned address\nmore")

    return run


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (changed(lambda y: y * 1.05), "its error is 0.05"),
        (changed(lambda y: y + math.nan), "its error is nan"),  # gradients stay right
        (unsteady, "two runs give different bits"),
        (raising, "RuntimeError: CUDA error: misaligned address"),
    ],
)
def test_a_planted_fault_is_named(
    fault: Fault, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_token, "triton_swiglu", fault(per_token.triton_swiglu))
    result = only("swiglu")
    assert result.problem.startswith(problem)
    assert "\n" not in result.problem
    assert math.isnan(result.error) == ("nan" in problem), "the largest error of all outputs"
    problem = f"kernel check on rank 1: {result.problem}"
    assert problems_of([[], [result]]) == {"swiglu": problem}
    other = replace(result, operation="pool")
    assert problems_of([[], [result, other], [other]]) == {"swiglu": problem, "pool": problem}
    passed = KernelResult("pool", "", error=1e-3, allowed=2e-2, seconds=1.5)
    assert table([passed])[1].split() == ["pool", "1.0e-03", "2.0e-02", "1.5", "ok"]
    assert result.problem in table([result])[-1]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_the_error_shown_is_the_worst_by_what_is_allowed(order: list[int]) -> None:
    """Of two outputs, three times what PyTorch loses; the other loses as much as PyTorch."""
    usual, actual = torch.tensor([1e-2, 1e-4])[order], torch.tensor([3e-2, 1e-4])[order]

    @torch.no_grad()
    def run(x: Tensor, backend: str) -> tuple[Tensor, ...]:
        lost = actual if backend == "triton" else usual * (x.dtype == torch.float32)
        return tuple(x * (1 + part) for part in lost)

    result = checks.check(checks.Operation("two", (torch.ones(8),), run), torch.float32)
    assert (result.error, result.allowed) == pytest.approx((3e-2, 4e-2), rel=1e-2)


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.bfloat16, 1), (torch.float32, 4)])
def test_a_few_roundings_are_allowed_where_pytorch_loses_nothing(
    dtype: torch.dtype, roundings: int
) -> None:
    copy = checks.Operation("copy", (torch.ones(8),), lambda x, backend: x.clone())
    result = checks.check(copy, dtype)
    assert (result.error, result.allowed) == (0, roundings * torch.finfo(dtype).eps)


def test_a_wrong_gradient_of_right_outputs_is_a_problem() -> None:
    def run(x: Tensor, backend: str) -> Tensor:
        return x + (x - x.detach()) / 20 if backend == "triton" else x.clone()

    result = checks.check(checks.Operation("copy", (torch.ones(8),), run), torch.bfloat16)
    assert result.problem.startswith("its error is 0.05")


def test_the_inputs_reach_what_kernels_treat_apart() -> None:
    """Documents of one token, of less than a block, and of more blocks than a query selects."""
    for window in (6, 100):
        config = replace(
            CONFIG, attention=replace(CONFIG.attention, spec=replace(SPEC, window=window))
        )
        first, longest, short, uneven = checks.lengths(config, packed=True, seq_len=0)
        assert first == 1
        assert longest > max(window, (SPEC.select_top + 1) * SPEC.select_len)
        assert longest % SPEC.block_stride
        assert short < SPEC.block_len < uneven
        assert checks.lengths(config, packed=False, seq_len=0) == [longest]
    assert checks.lengths(INDEXED, packed=False, seq_len=0)[0] < NSASpec.window, "it has none"
    operations = checks.operations(CONFIG, DEVICE, packed=True)
    logits, labels = next(x.inputs for x in operations if x.name == "cross_entropy")
    assert labels.min() == -100 < labels.max() < logits.shape[-1]
    for operation in checks.operations(CONFIG, DEVICE, packed=True):
        for x in operation.inputs:
            if x is not None and x.is_floating_point():
                assert torch.equal(x, x.bfloat16().to(x.dtype)), "exact in each dtype"


@pytest.mark.parametrize(("config", "count"), [(CONFIG, 8), (INDEXED, 5)])
def test_all_that_rotary_pool_computes_is_compared(config: ModelConfig, count: int) -> None:
    """Queries, pairs of keys and values by branch, an index's queries and keys, gates."""
    operations = checks.operations(config, DEVICE, packed=True)
    (operation,) = (x for x in operations if x.name == "rotary_pool")
    outputs = operation.run(*operation.inputs, backend="blockwise")
    assert len([x for x in outputs if x is not None and x.numel()]) == count


def second_block(index: Tensor) -> Tensor:
    return torch.where(index.max(-1).values > 3, 1, index[..., 1])


def no_block(index: Tensor) -> Tensor:
    """Of the first token, whose own block has importance 0."""
    return torch.cat([torch.full_like(index[:, :1, :, 0], -1), index[:, 1:, :, 0]], 1)


@pytest.mark.parametrize(("number", "wrong"), [(1, second_block), (0, no_block)])
def test_worse_blocks_are_a_problem(
    number: int, wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the branches attend to the blocks that are named."""
    right = band.select_forward

    def worse(x: Any) -> Tensor:
        index = right(x)
        index[..., number] = wrong(index)
        return index

    monkeypatch.setattr(band, "select_forward", worse)
    assert only("nsa_attention").problem.startswith("its error is")


def test_auto_takes_pytorch_for_a_disabled_operation_and_says_why() -> None:
    on_gpu = torch.empty(2, 3, 8, 4, device="meta")  # counts as a GPU
    reset_fallback_counts()
    assert dispatch("auto", "swiglu", on_gpu) is triton
    disable({"swiglu": "kernel check on rank 1: its error is 0.05"})
    assert dispatch("auto", "swiglu", on_gpu) is not triton
    assert dispatch("auto", "rotary_pool", on_gpu) is triton
    reasons = {(operation, reason) for operation, _, reason in fallback_counts()}
    assert ("swiglu", "kernel check on rank 1: its error is 0.05") in reasons
    with pytest.raises(ValueError, match="does not support swiglu: kernel check on rank 1"):
        dispatch("triton", "swiglu", on_gpu)
    x = torch.randn(3, 8)
    assert swiglu(x).shape == (3, 4)
    disable({"pool": "of a later check"})
    assert dispatch("auto", "swiglu", on_gpu) is triton


def test_without_the_fused_attention_its_branches_run_in_pytorch() -> None:
    x = Inputs.of(Case(SPEC, (30,)), torch.float32)
    on_gpu = [y.to("meta") for y in x.tensors()]  # counts as a GPU
    operators = []
    for reasons in ({}, {"nsa_attention": "kernel check on rank 0: two runs give different bits"}):
        disable(reasons)
        with Calls() as recorded:
            nsa_attention(*on_gpu, SPEC)
        operators.append({name for name in recorded.names if name.startswith("nsa::")})
    blockwise = {"nsa::blockwise_attention", "nsa::blockwise_select_blocks"}
    assert operators == [{"nsa::triton_gated"}, blockwise]


def test_a_dense_model_has_fewer_kernels() -> None:
    dense = replace(CONFIG, attention=AttentionConfig(kind="dense"))
    names = {operation.name for operation in checks.operations(dense, DEVICE, False)}
    assert names == ALL - {"pool", "nsa_attention", "selector_loss"}


def test_what_auto_runs_in_pytorch_by_design_is_left_out() -> None:
    """φ `pool` takes heads of up to 128."""
    large = replace(CONFIG, head_dim=144, heads=2, kv_heads=1, mlp_width=16)
    operation = next(x for x in checks.operations(large, DEVICE, False) if x.name == "pool")
    assert checks.check(operation, torch.float32) is None


def test_a_run_on_long_sequences_checks_the_kernels_of_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every, kernels = checks.operations, []
    attention = lambda *args: [x for x in every(*args) if x.name == "nsa_attention"]  # noqa: E731
    monkeypatch.setattr(checks, "operations", attention)
    short = DENSE_BLOCKS * SPEC.select_top * SPEC.select_len
    for seq_len in (short, short + 1):
        with recording(dry=False) as launches:
            (result,) = check_kernels(CONFIG, torch.float32, DEVICE, False, seq_len)
        assert result.problem == ""
        kernels.append({str(launch.config) for launch in launches})
    assert kernels[0] != kernels[1]


@pytest.mark.parametrize("config", [CONFIG, INDEXED], ids=["three branches", "index"])
def test_decoding_is_checked_too(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = m7c_kernels.decoding(config, DEVICE)
    right = checks.check(operation, torch.bfloat16)
    assert (right.operation, right.problem) == ("decode_attention", "")
    monkeypatch.setattr(decode, "triton_decode", unsteady(decode.triton_decode))
    faulty = checks.check(operation, torch.bfloat16)
    assert faulty.problem.startswith(("its error is", "two runs give different bits"))
