"""Memory that `nsa plan` counts, against PyTorch's allocator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.bench.traffic import as_on_cuda
from nsa.engine.build import build_model
from nsa.engine.config import RunConfig
from nsa.engine.planner_inputs import batch_of, model_of, zero_of
from nsa.model import LanguageModel
from nsa.model.config import ACTIVATION_CHECKPOINTING, ModelConfig
from nsa.planner.activations import activations
from nsa.planner.forecast import traffic
from nsa.planner.inputs import BatchShape, Model, Zero
from nsa.planner.memory import memory
from tests.planner.allocations import Allocations
from tests.planner.toys import BUCKET, toy
from tests.ranks import ROOT, launch

WORKER = Path(__file__).with_name("memory_ranks.py")
TOLERANCE = 0.10  # of a peak
CASES = {  # config: checkpointing mode, ranks per sequence, kind of attention
    "zero0_debug": "reentrant:1:dense",
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
    planned = memory(*setting(name), 2, fused=False)
    assert planned.peak == pytest.approx(engines[name]["peak"], rel=TOLERANCE)


@pytest.mark.parametrize("name", [param for param in PARAMS if param.values != ("zero3",)])
def test_memory_between_steps_is_that_of_live_tensors(
    engines: dict[str, dict[str, float]], name: str
) -> None:
    """Not stage 3, which keeps small parameters twice: a tenth of the toy."""
    planned = memory(*setting(name), 2, fused=False)
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


def one_pass(
    checkpointing: str,
    kind: str,
    *,
    compressor: str = "mean",
    shared: bool = False,
    branches: str = "cmp+sel+win",
) -> tuple[float, float]:
    """Return planned / measured: memory held for the backward pass, and the peak of both passes."""
    config = toy(checkpointing, kind)
    config.model.attention.compressor, config.model.attention.shared_kv = compressor, shared
    config.model.attention.branches = branches
    config.train.accumulation = 1
    net = build_model(config, torch.device("cpu")).bfloat16()
    ids = torch.randint(config.model.vocab_size, (1, config.data.seq_len))
    recorded = Allocations()
    with recorded.recording(), recorded.span("passes"):
        with recorded.span("forward"):
            loss = net(ids, labels=ids)
        if kind == "dense":  # on a CPU, sparse attention's tiles would dominate
            loss.backward()
    model, batch = model_of(config), batch_of(config)
    acts = activations(model, batch, fused=False)
    gradients = 2 * (
        config.model.width * batch.tokens + model.embedding
    )  # computed by the loss in the forward pass
    held = config.model.layers * acts.kept_layer + acts.shared + acts.final
    held += gradients - 2 * config.model.width * batch.tokens  # the head's input is not kept
    planned = memory(model, Zero(0), batch, 1, fused=False).phases
    passes = [phase for phase in planned if not phase.startswith("while")]
    peak = max(sum(planned[phase].values()) for phase in passes)
    return held / recorded.held["forward"], peak / recorded.peak["passes"]


@pytest.mark.parametrize(
    ("checkpointing", "kind"),
    [
        *((mode, "dense") for mode in ACTIVATION_CHECKPOINTING),
        *(pytest.param(mode, "nsa", marks=pytest.mark.full) for mode in ("reentrant", "selective")),
    ],
)
def test_activations_match_a_models(checkpointing: str, kind: str) -> None:
    held, peak = one_pass(checkpointing, kind)
    assert held == pytest.approx(1, abs=0.05)
    if kind == "dense":
        assert peak == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        pytest.param({"compressor": "mlp"}, "none", marks=pytest.mark.full),
        ({"compressor": "pool"}, "none"),
        pytest.param({"shared": True}, "none", marks=pytest.mark.full),
        pytest.param({"branches": "sel+win", "shared": True}, "none", marks=pytest.mark.full),
        ({"branches": "sel"}, "selective"),
    ],
)
def test_activations_match_each_kind_of_attention(changes: dict[str, Any], mode: str) -> None:
    held, _ = one_pass(mode, "nsa", **changes)
    assert held == pytest.approx(1, abs=0.02)


def saved_on_a_gpu(config: ModelConfig, tokens: Tensor) -> int:
    """Bytes that autograd saves in the forward pass, with the Triton backend on `meta`."""
    with torch.device("meta"):
        model = LanguageModel(config).bfloat16()
    weights = {x.untyped_storage()._cdata for x in model.parameters()}
    saved: dict[int, Tensor] = {}  # by storage, which a saved tensor keeps alive

    def pack(x: Tensor) -> Tensor:
        saved.setdefault(x.untyped_storage()._cdata, x)
        return x

    with as_on_cuda(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens, labels=tokens)
    return sum(x.untyped_storage().nbytes() for name, x in saved.items() if name not in weights)


@pytest.mark.parametrize(
    ("kind", "compressor"), [("nsa", "mean"), ("nsa", "pool"), ("dense", "mean")]
)
@pytest.mark.parametrize("mode", ["none", "reentrant"])
def test_activations_are_the_tensors_that_autograd_saves_on_a_gpu(
    mode: str, kind: str, compressor: str
) -> None:
    """The production run's micro-batch; `selective` saves tensors elsewhere."""
    config = RunConfig()
    config.model.attention.kind, config.model.activation_checkpointing = kind, mode
    config.model.attention.compressor = compressor
    model, batch = model_of(config), batch_of(config)
    tokens = torch.empty(batch.micro_batch, batch.seq_len, dtype=torch.long, device="meta")
    acts = activations(model, batch)
    # The loss computes the gradients of the head and of its input, which replaces the input.
    planned = config.model.layers * acts.kept_layer + acts.shared + acts.final
    planned += 2 * model.embedding
    assert planned == pytest.approx(saved_on_a_gpu(config.model, tokens), rel=0.005)


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


def test_fused_norms_and_sharding_take_less_memory() -> None:
    model, batch = model_of(toy()), batch_of(toy())
    on_gpu, on_cpu = (activations(model, batch, fused=fused) for fused in (True, False))
    assert on_gpu.kept_layer < on_cpu.kept_layer
    plans = [memory(model, Zero(stage, bucket=1), batch, 8) for stage in (0, 1, 3)]
    peaks = [sum(plan.static.values()) for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    sharded, whole = (memory(model, Zero(stage), batch, 8).static for stage in (3, 2))
    assert sharded["weights"] < whole["weights"]
