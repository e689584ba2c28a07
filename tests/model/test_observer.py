"""Observers of attention layers record each layer once and never change what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.model import LanguageModel
from nsa.model.config import ACTIVATION_CHECKPOINTING
from nsa.monitor.health import HealthRecorder
from tests.model.models import SPEC, build, packed, tiny, tokens
from tests.ops.cases import Calls

modes = pytest.mark.parametrize("mode", ACTIVATION_CHECKPOINTING)
IDS, DOCUMENTS = tokens(70), packed(3, 41, 0, 26)


def recorder_of(model: LanguageModel) -> HealthRecorder:
    return HealthRecorder(model.sparse_layers(), SPEC)


def forward(model: LanguageModel, ids: Tensor = IDS) -> Tensor:
    return model(ids, labels=ids.roll(-1, 1), cu_seqlens=DOCUMENTS)


def gradients(model: LanguageModel) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@modes
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


@modes
@pytest.mark.parametrize("when", ["forward", "backward"])
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
    for a, b in zip(gradients(model), gradients(alone), strict=True):
        assert torch.equal(a, b)


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
