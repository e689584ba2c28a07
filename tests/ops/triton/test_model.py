"""The language model on the Triton backend: loss and gradients, with any recomputation."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from nsa.model.config import ACTIVATION_CHECKPOINTING
from tests.kernel_launches import recording
from tests.model.models import ATTENTIONS, build, packed, tiny, tokens
from tests.ops.cases import default
from tests.ops.triton.parity import DEVICE, assert_exact_enough

LAYERS = 2
# A layer's forward launches; full recomputation repeats them.
FORWARD = {"band_forward_kernel": 1, "select_kernel": 1, "selected_forward_kernel": 1}


def step(attention: str, backend: str, mode: str, dtype: torch.dtype) -> list[Tensor]:
    """The loss of one batch of packed documents, and every gradient."""
    config = tiny(replace(ATTENTIONS[attention], backend=backend), activation_checkpointing=mode)
    model = build(config, dtype).to(DEVICE)
    ids, documents = tokens(19).to(DEVICE), packed(2, 0, 17).to(DEVICE)
    loss = model(ids, labels=ids.roll(-1, 1), cu_seqlens=documents)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@cache
def without_checkpointing(attention: str) -> list[Tensor]:
    return step(attention, "triton", "none", torch.float32)


@pytest.mark.parametrize("attention", default(4, ["mean", "mlp", "pool", "index", "index, mean"]))
def test_loss_and_gradients_are_those_of_the_other_backends(attention: str) -> None:
    usual, exact = (
        step(attention, "blockwise", "none", dtype) for dtype in (torch.float32, torch.float64)
    )
    assert_exact_enough(without_checkpointing(attention), usual, exact)


@pytest.mark.parametrize(
    "mode", default(1, sorted({*ACTIVATION_CHECKPOINTING} - {"none"}, reverse=True))
)
def test_recomputation_changes_no_bit_and_selective_runs_no_kernel_twice(mode: str) -> None:
    with recording(dry=False) as launches:
        results = step("mlp", "triton", mode, torch.float32)
    counts = Counter(launch.kernel.fn.__name__ for launch in launches)
    torch.testing.assert_close(results, without_checkpointing("mlp"), rtol=0, atol=0)
    times = LAYERS * (1 if mode == "selective" else 2)
    assert {name: counts[name] for name in FORWARD} == {k: n * times for k, n in FORWARD.items()}
    assert counts["band_queries_kernel"] == LAYERS
