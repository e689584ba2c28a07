from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from nsa.monitor.gates import GateRecorder

HEADS = 4


class Block(nn.Module):
    """Gates three copies of its input, as a layer with three branches does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, HEADS * 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).unflatten(-1, (HEADS, 3)).sigmoid()
        return x * gates.sum((-1, -2)).unsqueeze(-1)


def gate_means_by_hand(logits: list[torch.Tensor]) -> dict[str, float]:
    """Column h * 3 + branch, through a sigmoid written out, one number at a time."""
    means = {}
    for index, branch in enumerate(("cmp", "sel", "win")):
        layers = []
        for layer in logits:
            rows = layer.reshape(-1, HEADS * 3).tolist()
            gates = [
                1 / (1 + math.exp(-row[head * 3 + index])) for row in rows for head in range(HEADS)
            ]
            layers.append(sum(gates) / len(gates))
        means[branch] = sum(layers) / len(layers)
    return means


@pytest.fixture
def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block(), Block()])


def listen(blocks: nn.ModuleList) -> GateRecorder:
    return GateRecorder({f"layer {index}": block.gate for index, block in enumerate(blocks)})


def test_the_means_are_those_computed_by_hand(blocks: nn.ModuleList) -> None:
    recorder = listen(blocks)
    x = torch.randn(2, 5, 8)
    with recorder.armed():
        logits = [block.gate(x) for block in blocks]
    assert recorder.read() == pytest.approx(gate_means_by_hand(logits), abs=1e-6)
    assert recorder.read() == {}, "a reading is of what came since the last"


def test_bfloat16_gates_are_averaged_in_float32() -> None:
    gate = nn.Linear(1, 3, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(gate.weight)
    gate.weight.data[0] = 1.0
    recorder = GateRecorder({"layer": gate})
    x = torch.linspace(-1, 2, 4001, dtype=torch.bfloat16).unsqueeze(-1)
    with recorder.armed():
        gate(x)
    assert recorder.read()["cmp"] == pytest.approx(x.double().sigmoid().mean().item(), abs=1e-6)


SAVED = [  # among them operations that the recorder uses as well
    torch.ops.aten.mm.default,
    torch.ops.aten.sigmoid.default,
    torch.ops.aten.sum.dim_IntList,
]
KINDS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non_reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, SAVED),
    ),
}
Through = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def gradients(
    blocks: nn.ModuleList,
    micro_batches: list[torch.Tensor],
    through: Through,
    between: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Of the gates; `between` is called before each backward pass."""
    blocks.zero_grad()
    for x in micro_batches:
        for block in blocks:
            x = through(block, x)
        between()
        x.sum().backward()
    return [block.gate.weight.grad.clone() for block in blocks]


def make_micro_batches() -> list[torch.Tensor]:
    return [torch.randn(2, 5, 8, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_over_all_micro_batches_and_counts_a_recomputed_one_once(
    blocks: nn.ModuleList, kind: str
) -> None:
    micro_batches = make_micro_batches()
    logits: list[list[torch.Tensor]] = [[], []]
    for x in micro_batches:
        for layer, block in enumerate(blocks):
            logits[layer].append(block.gate(x))
            x = block(x)
    recorder = listen(blocks)
    with recorder.armed():
        gradients(blocks, micro_batches, KINDS[kind])
    by_hand = gate_means_by_hand([torch.cat(layer) for layer in logits])
    assert recorder.read() == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["throughout", "in the forward only", "in the backward only"])
def test_listening_never_changes_the_gradients(blocks: nn.ModuleList, kind: str, when: str) -> None:
    micro_batch = make_micro_batches()[:1]
    expected = gradients(blocks, micro_batch, lambda block, x: block(x))
    recorder = listen(blocks)
    if when != "in the backward only":
        recorder.arm()
    between = {
        "throughout": lambda: None,
        "in the forward only": recorder.disarm,
        "in the backward only": recorder.arm,
    }
    heard = gradients(blocks, micro_batch, KINDS[kind], between[when])
    torch.testing.assert_close(heard, expected, rtol=0, atol=0)


class CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_between_logged_steps_nothing_is_computed_or_kept(blocks: nn.ModuleList) -> None:
    x = torch.randn(2, 5, 8)

    def operations() -> int:
        with CountOperations() as counted:
            for block in blocks:
                block(x)
        return counted.count

    bare = operations()
    recorder = listen(blocks)
    assert operations() == bare
    assert recorder.read() == {}
    recorder.close()
    recorder.arm()
    assert operations() == bare
    assert recorder.read() == {}


def test_listening_keeps_no_activation_alive(blocks: nn.ModuleList) -> None:
    recorder = listen(blocks)
    with recorder.armed():
        output = blocks[0].gate(torch.randn(2, 5, 8))
    storage = StorageWeakRef(output.untyped_storage())
    assert not storage.expired()
    del output
    assert storage.expired()
    assert recorder.read()


def test_listening_never_waits_for_the_device(blocks: nn.ModuleList) -> None:
    blocks.to("meta")  # where fetching a value is an error
    recorder = listen(blocks)
    with recorder.armed():
        for block in blocks:
            block(torch.empty(2, 5, 8, device="meta"))
