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

from nsa.bench.schedule import program_costs, selections, simulated_time
from nsa.ops.triton.configs import Config, override_choices
from nsa.ops.triton.gated import Gated, gated_backward, gated_forward
from nsa.ops.triton.launch import Launch, recording
from nsa.spec import NSASpec
from tests.ops.cases import Case, Inputs
from tests.ops.triton.conftest import interpreter as fast_interpreter
from tests.ops.triton.parity import DEVICE, settings

interpreted = fast_interpreter  # a fixture

SPEC = NSASpec(4, 2, 20, 3, 1, 1, 37)
CASES = {
    "one document": Case(SPEC, (121,), batch=2, kv_heads=2, group=3, key_dim=4, value_dim=20),
    "packed": Case(SPEC, (3, 70, 0, 1, 31), kv_heads=2, group=3, key_dim=4, value_dim=20),
    "disjoint blocks": Case(NSASpec(7, 3, 4, 4, 2, 1, 5), (91,), kv_heads=1, group=2),
}


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
@pytest.mark.parametrize("tile", [Config(16, 16, 4, 1), Config(64, 16, 4, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_program_multiplies_as_often_as_counted(name: str, tile: Config) -> None:
    case = CASES[name]
    few = {"queries_per_split": 50, "chunk": 24, "dense_blocks": tile.rows}
    with settings(one_tile_head=tile.rows // 32 * 64, **few), recording(dry=False) as run:
        with override_choices(lambda *_: tile), counted_products(run) as counts:
            x = Gated(*Inputs.of(case, torch.float32).tensors(), case.cu_seqlens, case.spec, 1.0)
            o, *saved = gated_forward(x)
            gated_backward(o, x, *saved)
    offsets = np.array([0, case.seq_len] if case.offsets is None else case.offsets)
    masks, checked = selected_masks(saved[0], case), 0
    counts.extend(Counter[int]() for _ in range(len(run) - len(counts)))
    for launch, counted in zip(run, counts, strict=True):
        costs = program_costs(launch, offsets, masks)
        if costs is None:
            assert not counted, launch.kernel.fn.__name__
        else:
            expected = [counted[i] for i in range(prod(launch.grid))]
            assert costs.tolist() == expected, launch.kernel.fn.__name__
            checked += sum(expected) > 0
    assert checked == 7
