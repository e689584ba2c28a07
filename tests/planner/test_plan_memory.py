"""Memory that `nsa plan` counts, against DeepSpeed's engine and live tensors."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nsa.engine.config import RunConfig
from nsa.engine.micro_batch import batch_of, model_of, zero_of
from nsa.model.config import ModelConfig
from nsa.model.count import flops_per_token
from nsa.planner.activations import activations, count_layers, loss_bytes
from nsa.planner.forecast import Memory, flops_with_recomputation, memory, required, traffic
from nsa.planner.inputs import BatchShape, Model, Zero
from tests.planner.memory_ranks import BUCKET, toy
from tests.ranks import ROOT, launch_rows

WORKER = Path(__file__).with_name("memory_ranks.py")
FULL = pytest.mark.full
CASES = {  # config: checkpointing mode, kind of attention
    "zero0_debug": "deepspeed:dense",
    "zero1_pcie": "selective:nsa",
    "zero1_bf16acc": "none:dense",
    "zero2_pcie": "reentrant:dense",
    "zero3": "none:dense",
}
# One of them by default: the others' formulas are in tables below.
PARAMS = [name if name == "zero1_pcie" else pytest.param(name, marks=FULL) for name in CASES]


def setting(name: str) -> tuple[Model, Zero, BatchShape]:
    """Return the worker's setting as planner inputs."""
    config = toy(*CASES[name].split(":"))
    zero = zero_of(ROOT / f"ds_configs/{name}.json", config, 2)
    zero = replace(zero, bucket=BUCKET if zero.bucket else 0, prefetch=BUCKET)
    return model_of(config), zero, batch_of(config)


@pytest.mark.parametrize("name", PARAMS)
def test_memory_and_collectives_of_a_step_are_those_of_deepspeeds_engine(name: str) -> None:
    """Of rank 0 of two.

    Between steps: of live tensors. Not of stage 3, which keeps small parameters twice: a tenth of
    the toy. Collectives within 20%: buckets are not filled up, as a matrix is never split. Bytes
    within 2%: few are of the gradients' norm.
    """
    (row, *_), _ = launch_rows(WORKER, f"{name}:{CASES[name]}")
    planned, sent = memory(*setting(name), 2), traffic(*setting(name), 2)
    assert planned.peak == pytest.approx(row["peak"], rel=0.10)
    if name != "zero3":
        assert sum(planned.static.values()) == pytest.approx(row["between"], rel=0.01)
    assert sent.collectives == pytest.approx(row["collectives"], rel=0.2)
    assert sent.bytes_per_step == pytest.approx(row["sent"], rel=0.02)


def changed(mode: str = "none", **changes: Any) -> tuple[Model, BatchShape]:
    """Return M7C with changed settings of attention, or else of the model, and its batch."""
    config = RunConfig()
    config.model.activation_checkpointing = mode
    for name, value in changes.items():
        setattr(
            config.model.attention if hasattr(config.model.attention, name) else config.model,
            name,
            value,
        )
    return model_of(config), batch_of(config)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("none", {}),
        ("selective", {}),
        ("reentrant", {}),
        ("non_reentrant", {}),
        ("none", {"kind": "dense"}),
        ("none", {"compressor": "mlp"}),
        ("none", {"compressor": "pool", "selector_loss": 0.1}),
        ("none", {"branches": "sel+win"}),
        ("none", {"tied_head": False, "qk_norm": True}),
    ],
    ids=str,
)
def test_two_layers_stand_for_all(mode: str, changes: dict[str, Any]) -> None:
    model, batch = changed(mode, layers=5, **changes)
    counted = count_layers(model, batch, 5)
    with mock.patch("nsa.planner.activations.count_layers", wraps=count_layers) as counting:
        planned = activations(model, batch)
    assert [call.args[2] for call in counting.call_args_list] == [1, 2], "which is fast"
    assert (planned.before_loss, planned.loss) == (counted.before_loss, counted.loss)
    assert planned.last_layer == counted.last_layer
    assert planned.embedding == pytest.approx(counted.embedding, rel=0.01)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_of_few_layers_is_counted_whole(layers: int) -> None:
    model, batch = changed(layers=layers)
    assert activations(model, batch) == count_layers(model, batch, layers)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 512, "heads": 2, "kv_heads": 1},  # too large for the kernels
        {"kind": "dense", "value_dim": 32},
        {"kind": "dense", "value_dim": 128},
        {"branches": "win"},
        {"qkv_bias": True, "no_rope_every": 2},
    ],
    ids=str,
)
def test_every_model_is_counted(changes: dict[str, Any]) -> None:
    """The residual stream alone is five tensors of a layer's size."""
    model, batch = changed(**changes)
    held = activations(model, batch).before_loss
    assert held > 12 * 5 * 2 * 768 * batch.tokens


def test_activations_grow_with_tokens_and_with_the_bytes_of_a_number() -> None:
    model, batch = changed()
    one = activations(model, batch)
    two = activations(model, replace(batch, micro_batch=2 * batch.micro_batch))
    single = activations(replace(model, weight_bytes=4), batch)
    for counted, factor in ((two, 2), (single, 2)):
        assert counted.before_loss / one.before_loss == pytest.approx(factor, rel=0.1)


def test_the_kernels_of_a_gpu_are_counted_whatever_backend_is_set() -> None:
    assert activations(*changed(backend="reference")) == activations(*changed())


def test_deepspeeds_checkpointing_is_counted_as_reentrant() -> None:
    model, batch = changed("deepspeed")
    assert activations(model, batch) == activations(
        model, replace(batch, checkpointing="reentrant")
    )


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_modes_that_recompute_more_keep_less(kind: str) -> None:
    model, batch = changed(kind=kind)
    none, selective, reentrant = (
        activations(model, replace(batch, checkpointing=mode))
        for mode in ("none", "selective", "reentrant")
    )
    assert reentrant.before_loss < selective.before_loss < none.before_loss
    assert none.embedding < none.first_layer < none.last_layer, "tensors are freed on the way"
    # The last layer's tensors are back when its gradients are computed.
    layer = (none.before_loss - reentrant.before_loss) / 12
    assert reentrant.last_layer - reentrant.before_loss > layer
    stream = 2 * 768 * batch.tokens  # a layer keeps its input and the output before
    assert reentrant.before_loss == pytest.approx((2 * 12 + 1) * stream, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "rows", "gradients"), [(8_192, 8_192, 2), (16_384, 8_192, 4), (32_768, 8_192, 8)]
)
def test_the_loss_takes_a_chunks_logits_and_gradients(
    tokens: int, rows: int, gradients: int
) -> None:
    """Bytes per weight of the head: one gradient, two, or two and a sum in float32."""
    hidden, weight = (
        torch.empty(n, 768, device="meta", dtype=torch.bfloat16) for n in (tokens, 65_536)
    )
    expected = 2 * rows * 65_536 + 2 * tokens * 768 + gradients * 65_536 * 768
    assert loss_bytes(hidden, weight) == expected


def test_a_teacher_adds_its_head_input_and_both_models_logits() -> None:
    model, batch = changed()
    taught = replace(model, teacher=ModelConfig(width=1_024, heads=16))
    alone, more = activations(model, batch), activations(taught, batch)
    head_input = 2 * 1_024 * batch.tokens
    gradients = 2 * (768 * batch.tokens + model.embedding)
    assert more.before_loss - alone.before_loss == head_input
    assert more.last_layer - alone.last_layer == pytest.approx(gradients + head_input, rel=0.3)
    assert more.loss > gradients + alone.loss
    flops, more_flops = (flops_with_recomputation(one, batch, "nsa") for one in (model, taught))
    forward = flops_per_token(taught.teacher, batch.seq_len) / 3
    head = 6 * model.embedding  # the gradient of the divergence, by logits of its own
    assert more_flops - flops == pytest.approx(forward + head)


@pytest.mark.parametrize(
    ("zero", "ranks", "weight_bytes", "expected"),
    [  # bytes per parameter: weights, master weights, moments, gradients
        (Zero(0), 2, 2, (2, 4, 8, 0)),
        (Zero(0), 2, 4, (4, 0, 8, 0)),
        (Zero(1), 2, 2, (2, 2, 4, 0)),
        (Zero(1), 4, 4, (4, 1, 2, 0)),
        (Zero(1, accumulate_bytes=4), 2, 2, (2, 2, 4, 4)),
        (Zero(1, accumulate_bytes=4, bucket=9), 2, 2, (2, 2, 4, 0)),
        (Zero(2, accumulate_bytes=4), 2, 2, (2, 2, 4, 0)),
        (Zero(3), 4, 2, (0.5, 1, 2, 0)),
    ],
    ids=str,
)
def test_what_is_held_between_steps(
    zero: Zero, ranks: int, weight_bytes: int, expected: tuple[float, ...]
) -> None:
    model, batch = changed(layers=2)
    model = replace(model, weight_bytes=weight_bytes)
    static = memory(model, zero, batch, ranks).static
    names = "weights", "master weights", "optimizer moments", "gradients"
    assert [static[name] / model.parameters for name in names] == pytest.approx(expected, rel=1e-6)


def test_parameters_that_stage_3_does_not_shard_are_on_every_rank() -> None:
    model, batch = changed(layers=2)
    weights = memory(model, Zero(3, persistent=1_000), batch, 4).static["weights"]
    assert weights == pytest.approx(2 * ((model.parameters - 1_000) / 4 + 1_000), abs=2)


def test_a_teacher_has_weights_and_nothing_else() -> None:
    model, batch = changed(layers=2)
    larger, _ = changed(layers=3)
    taught = replace(model, teacher=larger.config)
    alone, static = (memory(one, Zero(1), batch, 2).static for one in (model, taught))
    assert (alone["teacher"], static["teacher"]) == (0, 2 * larger.parameters)
    assert {**static, "teacher": 0} == alone


@pytest.mark.parametrize(
    ("zero", "accumulation", "loss", "embedding", "reduced", "updated"),
    [  # bytes of gradients per parameter: in the loss, at the end, reduced, while updating
        (Zero(0), 1, 0, 2, 2 + 2, 2 + 4),
        (Zero(0), 2, 2, 2, 2 + 2, 2 + 4),
        (Zero(1, bucket=9), 1, 0, 2, 2, (2 + 2 + 4) / 4),
        (Zero(1, accumulate_bytes=4), 2, 2, 2, 2 + 4 + 2, 2 + 2),
        (Zero(1, reduce_bytes=4), 1, 0, 2, 2 + 2 + 4, (2 + 2 + 4) / 4),
        (Zero(2, bucket=9), 1, 0, 0.5, 0.5 + 0.5, (2 + 2 + 4) / 4),
        (Zero(2, bucket=9), 2, 0.5, 0.5 + 0.5, 0.5 + 0.5, (2 + 2 + 4) / 4),
        (Zero(2, accumulate_bytes=4, bucket=9), 2, 1, 1 + 1, 1 + 1, (4 + 4 + 4) / 4),
        (Zero(3, bucket=9), 2, 0.5, 0.5 + 0.5, 0.5 + 0.5, (2 + 2 + 4) / 4),
    ],
    ids=str,
)
def test_gradients_by_phase(
    zero: Zero, accumulation: int, loss: float, embedding: float, reduced: float, updated: float
) -> None:
    model, batch = changed(layers=2)
    phases = memory(model, zero, replace(batch, accumulation=accumulation), 4).phases
    counted = {name: parts["gradients"] / model.parameters for name, parts in phases.items()}
    assert counted["in the loss"] == counted["in the last layer's backward pass"]
    expected = loss, embedding, reduced, updated
    names = "in the loss", "in the embedding's backward pass"
    names += "while gradients are reduced", "while weights are updated"
    assert [counted[name] for name in names] == pytest.approx(expected, rel=1e-6)
    last_layer = (embedding - loss) * model.layer / model.parameters
    arrived = counted["in the first layer's backward pass"]
    assert arrived == pytest.approx(loss + last_layer, rel=1e-6)


def test_activations_buckets_and_gathered_weights_are_on_top() -> None:
    model, batch = changed(layers=2)
    phases, acts = memory(model, Zero(1), batch, 2).phases, activations(model, batch)
    assert phases["in the loss"]["logits and loss"] == acts.loss
    for phase, expected in (
        ("in the loss", acts.before_loss),
        ("in the last layer's backward pass", acts.last_layer),
        ("in the first layer's backward pass", acts.first_layer),
        ("in the embedding's backward pass", acts.embedding),
    ):
        assert phases[phase]["activations"] == expected
    for overlap, copies in ((False, 1), (True, 2)):
        zero = Zero(3, bucket=1_000, overlap=overlap, prefetch=500)
        phases = memory(model, zero, batch, 2).phases
        assert phases["in the loss"].get("buckets", 0) == 0
        assert phases["while weights are updated"]["buckets"] == 2 * copies * 1_000
        assert phases["in the loss"]["gathered weights"] == 2 * (model.parameters + 500)
        assert "gathered weights" not in phases["while weights are updated"]
        for name in ("last layer's", "first layer's", "embedding's"):
            parts = phases[f"in the {name} backward pass"]
            assert parts["buckets"] == phases["while gradients are reduced"]["buckets"]
            assert parts["gathered weights"] == phases["in the loss"]["gathered weights"]
    for stage, prefetch, gathered in ((2, 500, 0), (3, 5 * model.parameters, 4 * model.parameters)):
        zero = Zero(stage, bucket=1_000, prefetch=prefetch)
        assert memory(model, zero, batch, 2).phases["in the loss"]["gathered weights"] == gathered


def test_the_peak_is_the_largest_phase_on_top_of_what_is_held() -> None:
    one = Memory({"a": 3, "b": 0}, {"early": {"a": 1, "c": 4}, "late": {"a": 2, "c": 6}})
    assert (one.peak_phase, one.at_peak, one.peak) == ("late", {"a": 5, "c": 6}, 11)
    assert required(one) == pytest.approx(2e9 + 1.1 * 11, rel=1e-12)
