"""Memory as `nsa plan` counts it, held to what PyTorch's allocator gave out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.engine.build import build_model
from nsa.engine.plan_command import batch_of, model_of, zero_of
from nsa.model.config import ACTIVATION_CHECKPOINTING
from nsa.planner.memory import memory
from nsa.planner.model import Batch, Model, activations
from nsa.planner.traffic import Zero, traffic
from tests.planner.allocations import Allocations
from tests.planner.toys import BUCKET, toy
from tests.ranks import ROOT, launch

WORKER = Path(__file__).with_name("memory_ranks.py")
TOLERANCE = 0.10  # of a peak
CASES = {  # each config with a way of checkpointing, ranks that share a sequence, and attention
    "zero0_debug": "reentrant:1:dense",
    "zero1_pcie": "none:1:dense",
    "zero1_bf16acc": "selective:1:dense",
    "zero2_pcie": "reentrant:1:dense",
    "zero3": "none:1:dense",
    "zero1_pcie, shared": "none:2:dense",
    "zero2_pcie, shared": "reentrant:2:dense",
    "zero1_bf16acc, shared": "selective:2:nsa",
}
SHARED = [name for name in CASES if name.endswith("shared")]


def case_of(name: str) -> str:
    return f"{name.split(',')[0]}:{CASES[name]}"


def setting(name: str) -> tuple[Model, Zero, Batch]:
    """What the engine was given, as the planner reads it."""
    file, mode, shared_by, kind = case_of(name).split(":")
    config = toy(mode, kind, int(shared_by))
    zero = zero_of(ROOT / f"ds_configs/{file}.json", config, 2)
    zero = replace(zero, bucket=BUCKET if zero.bucket else 0, prefetch=BUCKET)
    return model_of(config), zero, batch_of(config)


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, float]]:
    """What DeepSpeed's engine allocated and started on rank 0 of two."""
    output, _ = launch(WORKER, *map(case_of, CASES))
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    by_case = {one["case"]: one for one in found}
    return {name: by_case[case_of(name)] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_is_within_10_percent_of_what_an_engine_allocates(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    planned = memory(*setting(name), 2, fused=False)
    assert planned.peak == pytest.approx(engines[name]["most"], rel=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in CASES if name != "zero3"])
def test_what_lies_between_steps_is_what_live_tensors_hold(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    """In stage 3 parameters below the threshold, a tenth of the toy, lie there once more."""
    planned = memory(*setting(name), 2, fused=False)
    assert planned.between == pytest.approx(engines[name]["between"], rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_as_many_collectives_are_planned_as_an_engine_starts(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    """Buckets are not filled up: a matrix goes into one of them as a whole."""
    planned = traffic(*setting(name), 2).collectives
    assert planned == pytest.approx(engines[name]["collectives"], rel=0.2)


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_sequences_send_what_was_planned(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    planned = traffic(*setting(name), 2).exchange
    assert planned > 0
    assert planned == pytest.approx(engines[name]["exchanged"], rel=0.02)


def one_pass(
    checkpointing: str,
    kind: str,
    *,
    compressor: str = "mean",
    shared: bool = False,
    branches: str = "cmp+sel+win",
) -> tuple[float, float]:
    """Planned over measured: what waits for the backward pass, and the peak of both passes."""
    config = toy(checkpointing, kind)
    config.model.attention.compressor, config.model.attention.shared_kv = compressor, shared
    config.model.attention.branches = branches
    config.train.accumulation = 1
    net = build_model(config, torch.device("cpu")).bfloat16()
    ids = torch.randint(config.model.vocab_size, (1, config.data.seq_len))
    seen = Allocations()
    with seen.watching(), seen.span("passes"):
        with seen.span("forward"):
            loss = net(ids, labels=ids)
        if kind == "dense":  # sparse attention's tiles, on a CPU, are most of so small a model
            loss.backward()
    model, batch = model_of(config), batch_of(config)
    found = activations(model, batch, fused=False)
    gradients = 2 * (model.width * batch.tokens + model.embedding)  # the loss makes them forward
    waits = model.layers * found.kept_layer + found.shared + found.final
    waits += gradients - 2 * model.width * batch.tokens  # what went into the head is not kept
    planned = memory(model, Zero(0), batch, 1, fused=False).moments
    passes = [moment for moment in planned if not moment.startswith("while")]
    peak = max(sum(planned[moment].values()) for moment in passes)
    return waits / seen.left["forward"], peak / seen.most["passes"]


@pytest.mark.parametrize("checkpointing", ACTIVATION_CHECKPOINTING)
def test_activations_are_those_that_a_model_keeps(checkpointing: str) -> None:
    sparse = ("nsa",) if checkpointing in ("reentrant", "selective") else ()
    for kind in ("dense", *sparse):
        waits, peak = one_pass(checkpointing, kind)
        assert waits == pytest.approx(1, abs=0.05), kind
        if kind == "dense":
            assert peak == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"compressor": "mlp"}, "none"),
        ({"shared": True}, "none"),
        ({"branches": "sel+win", "shared": True}, "none"),
        ({"branches": "sel"}, "selective"),
    ],
)
def test_activations_follow_the_kind_of_attention(changes: dict[str, Any], mode: str) -> None:
    waits, _ = one_pass(mode, "nsa", **changes)
    assert waits == pytest.approx(1, abs=0.02)


def test_a_gpu_keeps_less_than_a_cpu_and_sharding_less_than_none() -> None:
    model, batch = model_of(toy()), batch_of(toy())
    on_gpu, on_cpu = (activations(model, batch, fused=fused) for fused in (True, False))
    assert on_gpu.kept_layer < on_cpu.kept_layer
    peaks = [memory(model, Zero(stage, bucket=1), batch, 8).between for stage in (0, 1, 3)]
    assert peaks == sorted(peaks, reverse=True)
    sharded, whole = (memory(model, Zero(stage), batch, 8).always for stage in (3, 2))
    assert sharded["weights"] < whole["weights"]
