"""Building model and optimizer, and the checks before step 1.

What crashed or hung under DDP (F1, F2 in docs/design/security.md) is refused, and a kernel that is
wrong on one rank falls back on all.
"""

import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

from nsa.engine import checks
from nsa.engine.build import build_model, gradient_check_tokens, initialise, parameter_groups
from nsa.engine.checks import check_gradients, fall_back, inspect_gradients
from nsa.model import LanguageModel
from nsa.model.kernel_check import KernelResult
from nsa.ops.backend import disable, dispatch
from tests.engine.gradient_check_ranks import build
from tests.engine.small import small
from tests.model.models import tiny
from tests.ranks import launch_rows


def test_a_gradient_that_comes_twice_or_not_at_all_on_a_rank_is_named_on_both() -> None:
    rows, of_rank_1 = launch_rows(Path(__file__).with_name("gradient_check_ranks.py"))
    assert rows == of_rank_1, "the ranks must agree, or one would stop and the other hang"
    reports = {row.pop("model"): row for row in rows}
    assert reports["sound"] == {"twice": [], "missing": []}
    assert reports["head inside"]["twice"] == ["embed.weight"]
    for name in ("shared block", "repeats on one rank"):
        assert "blocks.0.mlp.down.weight" in reports[name]["twice"]
        assert reports[name]["missing"] == []
    skipped = reports["skips on one rank"]["missing"]
    assert skipped
    assert all(name.startswith("blocks.1.") for name in skipped)
    # DDP fails as the earlier runs did where a parameter fires twice.
    assert reports["sound under DDP"]["error"] is None
    error = reports["shared block under DDP"]["error"]
    assert "Expected to mark a variable ready only once" in error


@pytest.mark.parametrize(
    ("model", "problem", "fix"),
    [
        ("shared block", "gets its gradient more than once", "activation_checkpointing=non_reent"),
        ("unused", "gets no gradient on some rank", "make the loss depend on every parameter"),
    ],
)
def test_a_broken_rule_is_refused_with_the_fix(model: str, problem: str, fix: str) -> None:
    broken = build(model)
    with pytest.raises(ValueError, match=problem) as refused:
        check_gradients(broken, torch.arange(40)[None])
    others = len(list(broken.blocks[0].parameters())) - 1  # of the block that is wrong
    assert f"(and {others} more)" in str(refused.value)
    assert fix in str(refused.value)
    check_gradients(build("sound"), torch.arange(40)[None])


def test_the_check_leaves_no_gradient_and_no_hook() -> None:
    model = build("sound")
    for _ in range(2):
        assert inspect_gradients(model, torch.arange(40)[None]) == ([], [])
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("seq_len", "tokens"), [(96, 96), (10**6, 256)])
def test_the_check_does_not_grow_with_the_sequence(seq_len: int, tokens: int) -> None:
    config = small()
    config.data.seq_len = seq_len
    assert gradient_check_tokens(config) == tokens


@pytest.mark.parametrize(
    ("device", "backend", "skipped"),
    [
        ("cpu", "auto", "no GPU here"),
        ("cuda", "blockwise", "model.attention.backend=blockwise"),
        ("cuda", "auto", None),
        ("cuda", "triton", None),
    ],
)
def test_kernels_are_checked_on_a_gpu_unless_the_run_has_none_of_them(
    device: str, backend: str, skipped: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, slow = small(), KernelResult("swiglu", "", 0.0, 1e-3, 1.5)
    ranks = SimpleNamespace(gather=lambda value, kind: [value, [slow, slow]])
    config.model.attention.backend = backend
    config.data.packing, config.train.precision = "documents", "fp16"
    calls = []
    passed = KernelResult("swiglu", "", 0.0, 1e-3, 0.5)
    other = replace(passed, error=math.nan, allowed=math.inf)
    record = lambda *call: calls.append(call) or [passed, other]  # noqa: E731
    monkeypatch.setattr(checks, "check_kernels", record)  # there may be no GPU here
    check, rows = checks.check_kernels_on_all_ranks(config, torch.device(device), ranks)
    assert (check.status, check.detail) == (
        ("skip", skipped) if skipped else ("ok", "2 operations equal PyTorch's, 3.0 s")
    )
    call = (config.model, torch.float16, torch.device(device), True, config.data.seq_len)
    assert calls == ([] if skipped else [call])
    in_json = [asdict(passed), asdict(other) | {"error": None, "allowed": None}]
    assert rows == ([] if skipped else in_json)


def test_a_kernel_that_is_wrong_on_one_rank_falls_back() -> None:
    right = [KernelResult(name, "", 0.0, 1e-3, 0.5) for name in ("swiglu", "add_rms_norm")]
    results = [right, [replace(right[0], problem="its error is 0.045"), right[1]]]
    problem = "swiglu: kernel check on rank 1: its error is 0.045"
    refusal = rf"^model\.attention\.backend = 'triton': {problem}.*; set it to auto"
    with pytest.raises(ValueError, match=refusal):
        fall_back(results, "triton")
    on_gpu = torch.empty(2, 3, 8, 4, device="meta")  # counts as a GPU
    try:
        check = fall_back(results, "auto")
        chosen = [dispatch("auto", name, on_gpu).__name__ for name in ("swiglu", "add_rms_norm")]
    finally:
        disable({})
    assert check.status == "warn"
    assert check.detail.startswith(problem)
    assert [name.rpartition(".")[2] for name in chosen] == ["blockwise", "triton"]


CPU = torch.device("cpu")


def test_an_optimizer_that_deepspeed_leaves_plain_skips_steps_that_are_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of stage 0 with fp32."""

    def initialize(model_parameters: list[dict[str, Any]], **_: object) -> tuple[Any, None]:
        return SimpleNamespace(optimizer=torch.optim.AdamW(model_parameters)), None

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    linear = torch.nn.Linear(2, 1)  # whose bias gets no gradient
    before, optimizer = linear.weight.detach().clone(), initialise(linear, small(), {}).optimizer
    linear.weight.grad = torch.tensor([[1.0, math.nan]])
    optimizer.step()
    assert optimizer.overflow
    assert torch.equal(linear.weight, before)
    assert not optimizer.state
    linear.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert not optimizer.overflow
    assert not torch.equal(linear.weight, before)


def test_the_seed_determines_the_first_weights() -> None:
    config = small()
    weight = build_model(config, CPU).embed.weight
    assert torch.equal(build_model(config, CPU).embed.weight, weight)
    config.train.seed += 1
    assert not torch.equal(build_model(config, CPU).embed.weight, weight)
    assert build_model(config, torch.device("meta")).embed.weight.is_meta


def test_matrices_decay_and_norms_and_position_embeddings_do_not() -> None:
    model = LanguageModel(tiny("mlp"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], decayed["decay"]) == (0.3, 0.3)
    assert (others["weight_decay"], others["decay"]) == (0.0, 0.0)
    with_decay, without = ({names[id(p)] for p in x["params"]} for x in (decayed, others))
    assert with_decay | without == set(names.values())
    assert {"embed.weight", "blocks.0.attention.q.weight"} <= with_decay
    assert all("norm" in name or name.endswith((".position", ".bias")) for name in without)
    assert any("norm" in name for name in without)
    assert any(name.endswith(".position") for name in without)


def test_values_learn_at_a_rate_of_their_own_with_weight_decay() -> None:
    model = LanguageModel(tiny("index"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    *others, values = parameter_groups(model, 0.3, value_rate=0.5)
    assert (values["lr_factor"], values["weight_decay"], values["decay"]) == (0.5, 0.3, 0.3)
    learned = {names[id(parameter)] for parameter in values["params"]}
    assert learned == {f"blocks.{i}.attention.v.weight" for i in range(model.config.layers)}
    assert learned | {names[id(p)] for x in others for p in x["params"]} == set(names.values())
    assert not any("lr_factor" in group for group in others)
