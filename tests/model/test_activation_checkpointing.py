"""Activation checkpointing: all modes give the same results; they differ in what they recompute."""

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa.model import LanguageModel, ModelConfig
from nsa.model.config import ACTIVATION_CHECKPOINTING
from nsa.model.language_model import SAVED_OPS, checkpoint_function
from nsa.monitor.health import HealthRecorder
from nsa.ops.custom_op import IMPLEMENTATIONS
from tests.model.models import ATTENTIONS, IMPORTED, SPEC, build, packed, step, tiny, tokens
from tests.ops.cases import Calls

RECOMPUTING = tuple(mode for mode in ACTIVATION_CHECKPOINTING if mode != "none")
modes = pytest.mark.parametrize("mode", RECOMPUTING)
attentions = pytest.mark.parametrize("attention", ATTENTIONS)
IDS, DOCUMENTS = tokens(70), packed(3, 41, 0, 26)


@pytest.mark.parametrize("mode", ["none", "reentrant", "non_reentrant", "selective"])
def test_only_reentrant_records_no_graph_in_the_forward_pass(mode: str) -> None:
    recorded = []

    def segment(x: Tensor) -> Tensor:
        recorded.append(torch.is_grad_enabled())
        return x.exp()

    checkpoint_function(mode)(segment, torch.ones(2, requires_grad=True))
    assert recorded == [mode != "reentrant"]


def config_of(attention: str) -> ModelConfig:
    """The tiny model of a name in ATTENTIONS, with IMPORTED's properties if the name says so."""
    name = attention.removesuffix(", imported")
    return tiny(name, **(IMPORTED if name != attention else {}))


@cache
def without_checkpointing(attention: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = build(config_of(attention), torch.bfloat16)
    loss, gradients = step(model, IDS, DOCUMENTS)
    assert len(gradients) == len(list(model.parameters()))
    return loss, gradients


def attention_calls(recorded: Calls) -> Counter[str]:
    """How often attention and selection ops ran."""
    return Counter(
        name.removeprefix("nsa::")
        for name in recorded.names
        if name.startswith("nsa::blockwise") or "scaled_dot_product" in name
    )


@modes
@pytest.mark.parametrize(
    "attention", ["index", "index, mean", "mean", "mlp", "pool, imported", "dense, imported"]
)
def test_loss_and_gradients_are_those_without_checkpointing(attention: str, mode: str) -> None:
    """Bit for bit: recomputation runs the same ops on the same numbers, and selects as before."""
    loss, gradients = without_checkpointing(attention)
    config = replace(config_of(attention), activation_checkpointing=mode)
    again, recomputed = step(build(config, torch.bfloat16), IDS, DOCUMENTS)
    assert torch.equal(again, loss)
    torch.testing.assert_close(recomputed, gradients, rtol=0, atol=0)
    if attention.endswith("imported"):
        assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("mode", "forward_calls"),
    [("none", 1), ("selective", 1), ("non_reentrant", 2), ("reentrant", 2), ("deepspeed", 2)],
)
def test_attention_and_selection_are_recomputed_unless_their_outputs_are_saved(
    mode: str, forward_calls: int
) -> None:
    model = build(tiny("mean", activation_checkpointing=mode), torch.float32)
    with Calls() as recorded:
        step(model, IDS, DOCUMENTS)
    assert attention_calls(recorded) == {
        "blockwise_attention": 2 * 3 * forward_calls,
        "blockwise_select_blocks": 2 * forward_calls,
        "blockwise_attention_backward": 2 * 3,
    }
    dense = build(tiny("dense", value_dim=6, activation_checkpointing=mode), torch.float32)
    with Calls() as recorded:
        step(dense, IDS)
    calls = attention_calls(recorded)
    assert sum(n for name, n in calls.items() if "backward" not in name) == 2 * forward_calls


@pytest.mark.parametrize("attention", ["dense, imported", "index", "mlp"])
def test_selective_checkpointing_recomputes_no_matrix_product(attention: str) -> None:
    flops = {}
    for mode in ("none", "selective", "non_reentrant"):
        config = replace(config_of(attention), activation_checkpointing=mode)
        model = build(config, torch.float32)
        with FlopCounterMode(display=False) as counter:
            step(model, IDS, DOCUMENTS)
        flops[mode] = counter.get_total_flops()
    assert flops["selective"] <= 1.02 * flops["none"]
    assert flops["non_reentrant"] > 1.1 * flops["none"]


def test_selective_checkpointing_saves_every_kind_of_attention() -> None:
    """Of which a GPU runs some, each by an op of its own."""
    for module in ("band", "decode", "per_token", "pooling", "rotary", "selected", "selector_loss"):
        import_module(f"nsa.ops.triton.{module}")
    cheap = ("pool", "swiglu", "norm", "decode", "_backward")
    ours = {name for name in IMPLEMENTATIONS if not name.endswith(cheap)}
    theirs = set(torch._C._dispatch_get_all_op_names())
    kinds = ("flash_attention", "efficient_attention", "cudnn_attention", "attention_for_cpu")
    theirs = {x for x in theirs if "::_scaled_dot_product_" in x and x.endswith(kinds)}
    assert {x for x in ours if x.startswith("nsa::")} | theirs <= SAVED_OPS
    assert len(theirs) == len(kinds)


@attentions
def test_the_forward_pass_keeps_no_state(attention: str) -> None:
    model = build(tiny(attention), torch.float32)
    before = copy.deepcopy({name: vars(module) for name, module in model.named_modules()})
    first, second = model(IDS, cu_seqlens=DOCUMENTS), model(IDS, cu_seqlens=DOCUMENTS)
    assert torch.equal(first, second)
    reported = {"selector_target"}  # telemetry reads it
    for name, module in model.named_modules():
        assert set(vars(module)) - reported == set(before[name]), name
        for key, value in vars(module).items():
            if not key.startswith("_") and key not in reported:
                assert value == before[name][key], (name, key)
    assert not dict(model.named_buffers())


def test_training_with_auto_unresolved_is_refused() -> None:
    model = build(tiny("mean", activation_checkpointing="auto"), torch.float32)
    with torch.no_grad():
        model(IDS)
    with pytest.raises(ValueError, match=r"^model.activation_checkpointing = 'auto': only a run"):
        model(IDS, labels=IDS)


def recorder_of(model: LanguageModel) -> HealthRecorder:
    return HealthRecorder(model.sparse_layers(), SPEC)


def forward(model: LanguageModel, ids: Tensor = IDS) -> Tensor:
    return model(ids, labels=ids.roll(-1, 1), cu_seqlens=DOCUMENTS)


def gradients(model: LanguageModel) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", ACTIVATION_CHECKPOINTING)
def test_recomputation_and_a_second_micro_batch_do_not_change_the_recorded_health(
    mode: str,
) -> None:
    plain, model = (
        build(tiny("mean", activation_checkpointing=x), torch.float32) for x in ("none", mode)
    )
    alone, recorder = recorder_of(plain), recorder_of(model)
    alone.arm()
    with torch.no_grad():
        forward(plain)
    expected = alone.read()
    recorder.arm()
    for ids in (IDS, tokens(70, seed=1)):
        forward(model, ids).backward()
    assert recorder.read() == expected
    assert len({str(layer) for layer in expected}) == 2, "each layer has its own figures"
    assert expected[0]["choosing"] > 0.5


@pytest.mark.parametrize(
    ("mode", "when"),
    [("none", "forward"), *product(["reentrant", "non_reentrant"], ["forward", "backward"])],
)
def test_observing_never_changes_loss_or_gradients(mode: str, when: str) -> None:
    """Also if it begins between a pass and its recomputation."""
    alone, model = (
        build(tiny("mlp", activation_checkpointing=mode), torch.float32) for _ in range(2)
    )
    recorder = recorder_of(model)
    if when == "forward":
        recorder.arm()
    observed, loss = forward(model), forward(alone)
    if when == "backward":
        recorder.arm()
    observed.backward()
    loss.backward()
    assert torch.equal(observed, loss)
    torch.testing.assert_close(gradients(model), gradients(alone), rtol=0, atol=0)


def test_between_logged_steps_nothing_is_computed_or_kept() -> None:
    model = build(tiny("mean"), torch.float32)

    def operations() -> int:
        with Calls() as recorded:
            forward(model)
        return len(recorded.calls)

    bare = operations()
    recorder = recorder_of(model)
    assert operations() == bare
    assert recorder.read() == []
    recorder.arm()
    forward(model)
    assert len(recorder.read()) == 2
    assert operations() == bare
    assert recorder.read() == []
