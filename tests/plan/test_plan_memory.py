"""Memory as `nsa plan` counts it, held to what PyTorch's allocator gave out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa.engine.build import build_model
from nsa.engine.planning import batch_of, model_of, zero_of
from nsa.plan.memory import memory
from nsa.plan.model import CHECKPOINTING, activations
from nsa.plan.traffic import Zero
from tests.plan.allocations import Allocations
from tests.plan.toys import BUCKET, toy
from tests.ranks import ROOT, launch

WORKER = Path(__file__).with_name("memory_ranks.py")
TOLERANCE = 0.10  # of a peak
CASES = {  # each config with one way of checkpointing
    "zero0_debug": "reentrant",
    "zero1_pcie": "none",
    "zero1_bf16acc": "selective",
    "zero2_pcie": "reentrant",
    "zero3": "none",
}


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, int]]:
    """What DeepSpeed's engine allocated on rank 0 of two."""
    output, _ = launch(WORKER, *(f"{name}:{mode}" for name, mode in CASES.items()))
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    return {one["case"][0]: one for one in found}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_is_within_10_percent_of_what_an_engine_allocates(
    engines: dict[str, dict[str, int]], name: str
) -> None:
    config = toy(CASES[name])
    zero = zero_of(ROOT / f"ds_configs/{name}.json", config, 2)
    zero = replace(zero, bucket=BUCKET if zero.bucket else 0, prefetch=BUCKET)
    planned = memory(model_of(config), zero, batch_of(config), 2, fused=False)
    assert planned.peak == pytest.approx(engines[name]["most"], rel=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in CASES if name != "zero3"])
def test_what_lies_between_steps_is_what_live_tensors_hold(
    engines: dict[str, dict[str, int]], name: str
) -> None:
    """In stage 3 parameters below the threshold, a tenth of the toy, lie there once more."""
    config = toy(CASES[name])
    zero = zero_of(ROOT / f"ds_configs/{name}.json", config, 2)
    planned = memory(model_of(config), zero, batch_of(config), 2, fused=False)
    assert planned.always == pytest.approx(engines[name]["between"], rel=0.01)


def one_pass(
    checkpointing: str, kind: str, *, compressor: str = "mean", shared: bool = False
) -> tuple[float, float]:
    """Planned over measured: what waits for the backward pass, and the peak of both passes."""
    config = toy(checkpointing, kind)
    config.model.attention.compressor, config.model.attention.shared_kv = compressor, shared
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
    planned = memory(model, Zero(0), batch, 1, fused=False)
    peak = max(planned.at_loss, planned.at_backward) - planned.always
    return waits / seen.left["forward"], peak / seen.most["passes"]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_activations_are_those_that_a_model_keeps(checkpointing: str) -> None:
    sparse = ("nsa",) if checkpointing in ("reentrant", "selective") else ()
    for kind in ("dense", *sparse):
        waits, peak = one_pass(checkpointing, kind)
        assert waits == pytest.approx(1, abs=0.05), kind
        if kind == "dense":
            assert peak == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize(("compressor", "shared"), [("mlp", False), ("mean", True)])
def test_activations_follow_the_kind_of_attention(compressor: str, shared: bool) -> None:
    waits, _ = one_pass("none", "nsa", compressor=compressor, shared=shared)
    assert waits == pytest.approx(1, abs=0.02)


def test_a_gpu_keeps_less_than_a_cpu_and_sharding_less_than_none() -> None:
    model, batch = model_of(toy()), batch_of(toy())
    on_gpu, on_cpu = (activations(model, batch, fused=fused) for fused in (True, False))
    assert on_gpu.kept_layer < on_cpu.kept_layer
    peaks = [memory(model, Zero(stage, bucket=1), batch, 8).always for stage in (0, 1, 3)]
    assert peaks == sorted(peaks, reverse=True)
    assert memory(model, Zero(3), batch, 8).weights < memory(model, Zero(2), batch, 8).weights
