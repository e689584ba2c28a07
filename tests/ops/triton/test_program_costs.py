"""Multiply-adds of programs against those counted in the interpreter, and a simulated schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from nsa.model import ModelConfig
from nsa.ops.inputs import GatedInputs
from nsa.ops.triton.band import gated_backward, gated_forward
from nsa.ops.triton.configs import Config, choosing_for, override_choices
from nsa.ops.triton.launch import Launch, recording
from nsa.spec import NSASpec
from tests.operations import record_operations
from tests.ops.cases import Case, Inputs
from tests.ops.triton.parity import DEVICE, settings
from tests.ops.triton.program_costs import program_costs, selections, simulated

SPEC = NSASpec(4, 2, 20, 3, 1, 1, 37)
CASES = {
    "one document": Case(SPEC, (91,), batch=2, kv_heads=1, group=3, key_dim=4, value_dim=20),
    "packed": Case(SPEC, (3, 62, 0, 1, 21), kv_heads=2, group=3, key_dim=4, value_dim=20),
    "disjoint blocks": Case(NSASpec(7, 3, 4, 4, 2, 1, 5), (91,), kv_heads=1, group=2),
}
SMALL, LARGE = Config(16, 16, 4, 1), Config(64, 16, 4, 1)


@contextmanager
def counted_products(launches: list[Launch]) -> Iterator[list[Counter[int]]]:
    """Count each launch's multiply-adds by the number of the program in the grid's order."""
    builder, counts = interpreter.interpreter_builder, list[Counter[int]]()
    create_dot = builder.create_dot

    def counting(a: Any, b: Any, *rest: Any) -> Any:
        counts.extend(Counter[int]() for _ in range(len(launches) - len(counts)))
        (x, y, z), (across, down, _) = builder.grid_idx, builder.grid_dim
        counts[-1][x + across * (y + down * z)] += a.data.shape[0] * b.data.size
        return create_dot(a, b, *rest)

    with mock.patch.object(builder, "create_dot", counting):
        yield counts


def selected_masks(index: Tensor, case: Case) -> list[Any]:
    """Of each batch row and head, as `selections` returns them."""
    blocks = case.spec.select_blocks_len(max(case.lengths))
    masks = torch.zeros(*index.shape[:3], blocks + 1, dtype=torch.bool)
    masks.scatter_(3, index.long() % (blocks + 1), True)  # -1, none, becomes the last
    return list(masks[..., :blocks].transpose(1, 2).flatten(0, 1).numpy())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter counts")
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("one document", LARGE),
        ("packed", SMALL),
        ("disjoint blocks", SMALL),
        pytest.param("one document", SMALL, marks=pytest.mark.full),
        pytest.param("packed", LARGE, marks=pytest.mark.full),
        pytest.param("disjoint blocks", LARGE, marks=pytest.mark.full),
    ],
)
def test_every_program_multiplies_as_often_as_counted(name: str, tile: Config) -> None:
    case = CASES[name]
    few = {"queries_per_split": 50, "chunk": 24, "dense_blocks": tile.rows}
    few |= {"one_tile_head": tile.rows // 32 * 64, "short": 1000 if tile.rows == 16 else 0}
    with (
        settings(**few),
        recording(dry=False) as run,
        override_choices(lambda *_: tile),
        counted_products(run) as counts,
    ):
        x = GatedInputs(*Inputs.of(case, torch.float32).tensors(), case.cu_seqlens, case.spec, 1.0)
        o, *saved = gated_forward(x)
        gated_backward(o, x, *saved)
    offsets = np.array([0, case.seq_len] if case.offsets is None else case.offsets)
    masks, checked = selected_masks(saved[0], case), 0
    counts.extend(Counter[int]() for _ in range(len(run) - len(counts)))
    for launch, counted in zip(run, counts, strict=True):
        costs = program_costs(launch, offsets, masks)
        if costs is None:
            assert not counted or launch.kernel.fn.__name__ == "select_kernel"
        else:
            expected = [counted[i] for i in range(prod(launch.grid))]
            assert costs.tolist() == expected, launch.kernel.fn.__name__
            checked += sum(expected) > 0
    assert checked == 6


@pytest.mark.parametrize("kind", ["random", "local"])
@pytest.mark.parametrize("multiprocessors", [108, 132])
@pytest.mark.parametrize(("batch", "seq_len"), [(8, 2048), (16, 1024), (4, 4096), (2, 8192)])
def test_attention_of_16384_tokens_is_balanced(
    batch: int, seq_len: int, multiprocessors: int, kind: str
) -> None:
    """M7C's heads and the tiles of sm_80; all but block selection, which takes little."""
    spec, offsets = NSASpec(), np.array([0, seq_len])
    masks = selections(kind, offsets, spec, 2 * batch)
    ratios = {}
    with choosing_for("sm_80"):
        operations = record_operations(ModelConfig(layers=1), batch, seq_len)
    for launch in (x.launch for operation in operations for x in operation.launches if x.launch):
        costs = program_costs(launch, offsets, masks)
        if costs is not None:
            balanced = costs.sum() / multiprocessors
            ratios[launch.kernel.fn.__name__] = simulated(costs, multiprocessors, 1) / balanced
    assert len(ratios) == 6
    assert max(ratios.values()) <= 1.10, ratios
