"""Memory that `nsa plan` counts, against DeepSpeed's engine and live tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.engine.config import RunConfig
from nsa.engine.planner_inputs import batch_of, model_of, zero_of
from nsa.model import LanguageModel
from nsa.planner.activations import activations
from nsa.planner.forecast import traffic
from nsa.planner.inputs import BatchShape, Model, Zero
from nsa.planner.memory import memory
from tests.operations import as_on_cuda
from tests.planner.allocations import LiveTensors
from tests.planner.toys import BUCKET, toy
from tests.ranks import ROOT, launch

WORKER = Path(__file__).with_name("memory_ranks.py")
TOLERANCE = 0.10  # of a peak
CASES = {  # config: checkpointing mode, ranks per sequence, kind of attention
    "zero0_debug": "deepspeed:1:dense",
    "zero1_pcie": "none:1:dense",
    "zero1_bf16acc": "selective:1:dense",
    "zero2_pcie": "reentrant:1:dense",
    "zero3": "none:1:dense",
    "zero1_pcie, shared": "none:2:dense",
    "zero2_pcie, shared": "reentrant:2:dense",
    "zero1_bf16acc, shared": "selective:2:nsa",
}
FULL = ("zero1_bf16acc", "zero0_debug", "zero1_pcie, shared", "zero2_pcie, shared")
PARAMS = [
    pytest.param(name, marks=pytest.mark.full) if name in FULL else pytest.param(name)
    for name in CASES
]


def case_of(name: str) -> str:
    return f"{name.split(',')[0]}:{CASES[name]}"


def setting(name: str) -> tuple[Model, Zero, BatchShape]:
    """Return the worker's setting as planner inputs."""
    file, mode, ranks_per_sequence, kind = case_of(name).split(":")
    config = toy(mode, kind, int(ranks_per_sequence))
    zero = zero_of(ROOT / f"ds_configs/{file}.json", config, 2)
    zero = replace(zero, bucket=BUCKET if zero.bucket else 0, prefetch=BUCKET)
    return model_of(config), zero, batch_of(config)


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """Allocations and collectives of DeepSpeed's engine on rank 0 of two."""
    names = [name for name in CASES if name not in FULL or request.config.getoption("--full")]
    output, _ = launch(WORKER, *map(case_of, names))
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    by_case = {row["case"]: row for row in rows}
    return {name: by_case[case_of(name)] for name in names}


@pytest.mark.parametrize("name", PARAMS)
def test_the_peak_of_a_step_is_within_10_percent_of_the_engines(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    planned = memory(*setting(name), 2)
    assert planned.peak == pytest.approx(engines[name]["peak"], rel=TOLERANCE)


@pytest.mark.parametrize("name", [param for param in PARAMS if param.values != ("zero3",)])
def test_memory_between_steps_is_that_of_live_tensors(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    """Not stage 3, which keeps small parameters twice: a tenth of the toy."""
    planned = memory(*setting(name), 2)
    static = sum(planned.static.values())
    assert static == pytest.approx(engines[name]["between"], rel=0.01)


@pytest.mark.parametrize("name", PARAMS)
def test_the_number_of_collectives_is_that_of_the_engine(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    """Within 20%: buckets are not filled up, as a matrix is never split."""
    planned = traffic(*setting(name), 2).collectives
    assert planned == pytest.approx(engines[name]["collectives"], rel=0.2)


@pytest.mark.parametrize("name", [param for param in PARAMS if "shared" in param.values[0]])
def test_sequence_parallel_traffic_is_that_of_the_engine(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    planned = traffic(*setting(name), 2).exchange
    assert planned > 0
    assert planned == pytest.approx(engines[name]["exchanged"], rel=0.02)


def one_pass(config: RunConfig) -> tuple[float, float]:
    """Return planned / counted: memory held for the backward pass, and the peak in that pass.

    Counted on `meta` tensors with the Triton backend, whose ops allocate their results there.
    """
    attention = replace(config.model.attention, backend="triton")
    with torch.device("meta"):
        net = LanguageModel(replace(config.model, attention=attention)).bfloat16()
    tokens = torch.empty(config.train.micro_batch, config.data.seq_len, dtype=torch.long)
    live = LiveTensors()
    with as_on_cuda(), live:
        loss = net(tokens.to("meta"), labels=tokens.to("meta"))
        held = live.peak = live.bytes
        loss.backward()
    model, batch = model_of(config), replace(batch_of(config), accumulation=1)
    acts = activations(model, batch)
    # The loss computes the gradients of the head and of its input, which replaces the input.
    planned = config.model.layers * acts.kept_layer + acts.shared + acts.final
    planned += model.weight_bytes * model.embedding
    phases = memory(model, Zero(0), batch, 1).phases
    peak = max(sum(parts.values()) for phase, parts in phases.items() if "pass" in phase)
    return planned / held, peak / live.peak


@pytest.mark.parametrize("kind", ["nsa", "dense"])
@pytest.mark.parametrize("mode", ["none", "selective", "reentrant", "non_reentrant"])
def test_activations_are_those_of_the_production_runs_micro_batch(mode: str, kind: str) -> None:
    config = RunConfig()
    config.model.attention.kind, config.model.activation_checkpointing = kind, mode
    held, peak = one_pass(config)
    assert held == pytest.approx(1, abs=0.005)
    assert peak == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": "mlp"},
        {"compressor": "pool"},
        {"branches": "sel+win"},
        {"branches": "sel"},
    ],
    ids=str,
)
def test_activations_match_each_kind_of_attention(changes: dict[str, Any], mode: str) -> None:
    config = RunConfig()
    config.model.activation_checkpointing = mode
    vars(config.model.attention).update(changes)
    held, peak = one_pass(config)
    assert held == pytest.approx(1, abs=0.005)
    assert peak == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_modes_that_recompute_more_keep_less(kind: str) -> None:
    config = RunConfig()
    config.model.attention.kind = kind
    modes = [
        activations(model_of(config), replace(batch_of(config), checkpointing=mode))
        for mode in ("reentrant", "selective", "none")
    ]
    assert modes[0].kept_layer < modes[1].kept_layer < modes[2].kept_layer
    assert modes[0].recomputed > modes[1].recomputed > modes[2].recomputed == 0


def test_sharding_takes_less_memory() -> None:
    model, batch = model_of(toy()), batch_of(toy())
    plans = [memory(model, Zero(stage, bucket=1), batch, 8) for stage in (0, 1, 3)]
    peaks = [sum(plan.static.values()) for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    sharded, whole = (memory(model, Zero(stage), batch, 8).static for stage in (3, 2))
    assert sharded["weights"] < whole["weights"]
