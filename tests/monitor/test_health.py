from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nsa.monitor import health
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import BRANCHES, DISTANCES, GATE_BINS, Health, LayerHealth
from nsa.spec import NSASpec
from tests.model.models import packed

SPEC = NSASpec(4, 2, 4, 5, 1, 2, 6)
HEADS, KV_HEADS = 4, 2


def make_gates(batch: int, length: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, HEADS, 3, generator=draw).mul(3).sigmoid()


def starts_of(length: int, cu_seqlens: Tensor | None) -> list[int]:
    """Where the document of each position begins."""
    if cu_seqlens is None:
        return [0] * length
    ends = cu_seqlens.tolist()
    return [max(start for start in ends[:-1] if start <= t) for t in range(length)]


def choose(
    batch: int, length: int, spec: NSASpec, cu_seqlens: Tensor | None = None, seed: int = 0
) -> Tensor:
    """Forced blocks and random others, ascending, padded with -1: as selection writes them."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batch):
        for t, start in enumerate(starts_of(length, cu_seqlens)):
            own = (t - start) // spec.select_len
            for _ in range(KV_HEADS):
                kept = {b for b in range(own + 1) if is_forced(b, own, spec)}
                others = [b for b in range(own + 1) if b not in kept]
                order = torch.randperm(len(others), generator=draw).tolist()
                kept |= {others[place] for place in order[: spec.select_top - len(kept)]}
                rows.append(sorted(kept) + [-1] * (spec.select_top - len(kept)))
    return torch.tensor(rows, dtype=torch.int32).view(batch, length, KV_HEADS, spec.select_top)


def is_forced(block: int, own: int, spec: NSASpec) -> bool:
    return block < spec.init_blocks or block > own - spec.local_blocks


def by_hand(
    gates: Tensor, blocks: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, stride: int = 1
) -> LayerHealth:
    """The definitions of docs/health.md, one number at a time."""
    batch, length = gates.shape[:2]
    starts = starts_of(length, cu_seqlens)
    sampled = range(0, length, stride)
    values = {
        branch: gates[:, ::stride, :, index].double().flatten().tolist()
        for index, branch in enumerate(BRANCHES)
    }
    means = {branch: sum(found) / len(found) for branch, found in values.items()}
    all_picks = forced = compared = shared = 0
    free: list[tuple[int, int, int]] = []  # head, block, distance
    for b in range(batch):
        for t in sampled:
            own = (t - starts[t]) // spec.select_len
            for head in range(KV_HEADS):
                picks = [pick for pick in blocks[b, t, head].tolist() if pick >= 0]
                all_picks += len(picks)
                forced += sum(is_forced(pick, own, spec) for pick in picks)
                if own + 1 <= spec.select_top:
                    continue
                mine = [pick for pick in picks if not is_forced(pick, own, spec)]
                free += [(head, pick, own - pick) for pick in mine]
                if t > starts[t]:
                    compared += len(mine)
                    shared += len(set(mine) & set(blocks[b, t - 1, head].tolist()))
    most = max((t - starts[t]) // spec.select_len for t in sampled) + 1
    always = spec.init_blocks + spec.local_blocks
    entropies = []
    for head in range(KV_HEADS):
        mine = [block for of, block, _ in free if of == head]
        parts = [mine.count(block) / len(mine) for block in set(mine)]
        least = math.log(spec.select_top - always)
        entropy = -sum(part * math.log(part) for part in parts)
        entropies.append((entropy - least) / (math.log(most - always) - least) if mine else 0.0)
    edges = [*DISTANCES, math.inf]
    return LayerHealth(
        gate_mean=means,
        gate_std={
            branch: math.sqrt(sum((one - means[branch]) ** 2 for one in found) / len(found))
            for branch, found in values.items()
        },
        gate_saturated={
            branch: sum(one < 0.05 or one >= 0.95 for one in found) / len(found)
            for branch, found in values.items()
        },
        gate_bins={
            branch: [
                sum(int(one * GATE_BINS) == bin_ for one in found) / len(found)
                for bin_ in range(GATE_BINS)
            ]
            for branch, found in values.items()
        },
        choosing=sum((t - starts[t]) // spec.select_len >= spec.select_top for t in sampled)
        / len(sampled),
        forced=forced / all_picks,
        entropy=sum(entropies) / len(entropies) if free else None,
        overlap=shared / compared if compared else None,
        distance=sum(back for *_, back in free) / len(free) if free else None,
        distances=[
            sum(low <= back < high for *_, back in free) / len(free)
            for low, high in pairwise(edges)
        ]
        if free
        else [],
    )


def figures(layer: LayerHealth) -> list[Any]:
    parts: list[Any] = []
    for value in vars(layer).values():
        for part in value.values() if isinstance(value, dict) else [value]:
            parts += part if isinstance(part, list) else [part]
    return parts


def assert_same(actual: Health | None, expected: list[LayerHealth]) -> None:
    assert actual is not None
    assert len(actual.layers) == len(expected)
    for mine, other in zip(actual.layers, expected, strict=True):
        assert figures(mine) == pytest.approx(figures(other), abs=2e-6)


def listen(layers: int, spec: NSASpec = SPEC) -> tuple[HealthRecorder, list[Any]]:
    """A recorder that is armed, and the layers that it listens to."""
    found = [SimpleNamespace(observer=None) for _ in range(layers)]
    recorder = HealthRecorder({f"layer {i}": layer for i, layer in enumerate(found)}, spec)
    recorder.arm()
    return recorder, found


@pytest.mark.parametrize("spec", [SPEC, NSASpec(4, 2, 4, 4, 0, 1, 6), NSASpec(8, 4, 8, 6, 2, 3)])
@pytest.mark.parametrize(
    ("batch", "documents"), [(2, (90,)), (1, (3, 41, 0, 26, 1, 60)), (1, (9, 11))], ids=str
)
def test_every_figure_is_the_one_counted_by_hand(
    spec: NSASpec, batch: int, documents: tuple[int, ...]
) -> None:
    length = sum(documents)
    cu_seqlens = packed(*documents) if len(documents) > 1 else None
    recorder, layers = listen(2, spec)
    told = []
    for seed, layer in enumerate(layers):
        said = make_gates(batch, length, seed), choose(batch, length, spec, cu_seqlens, seed)
        layer.observer(*said, cu_seqlens)
        told.append(by_hand(*said, spec, cu_seqlens))
    heard = recorder.read()
    assert_same(heard, told)
    assert heard is not None
    for branch, mean in heard.gates.items():
        assert mean == pytest.approx(sum(layer.gate_mean[branch] for layer in told) / 2, abs=1e-6)


@pytest.mark.parametrize(("batch", "most", "stride"), [(1, 40, 3), (2, 60, 4), (1, 120, 1)])
def test_of_a_long_sequence_queries_at_a_fixed_distance_are_taken(
    batch: int, most: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MOST_QUERIES", most)
    documents = packed(9, 50, 61) if batch == 1 else None
    recorder, (layer,) = listen(1)
    said = make_gates(batch, 120), choose(batch, 120, SPEC, documents)
    layer.observer(*said, documents)
    assert_same(recorder.read(), [by_hand(*said, SPEC, documents, stride)])


def choose_always(own_to_picks: Any, length: int = 400) -> Tensor:
    """The same for each head: the forced ones, and what the function says of a query's block."""
    rows = []
    for t in range(length):
        own = t // SPEC.select_len
        kept = {b for b in range(own + 1) if is_forced(b, own, SPEC)}
        kept |= set(range(own + 1)) if own < SPEC.select_top else set(own_to_picks(own))
        rows.append([sorted(kept) + [-1] * (SPEC.select_top - len(kept))] * KV_HEADS)
    return torch.tensor([rows], dtype=torch.int32)


def test_collapsed_selection_shows_as_no_entropy_and_whole_overlap() -> None:
    recorder, (layer,) = listen(1)
    layer.observer(make_gates(1, 400), choose_always(lambda own: (1, 2)), None)
    (found,) = recorder.read().layers
    assert found.entropy == pytest.approx(0, abs=1e-6)
    assert found.overlap == 1
    assert found.distance > 40


def test_selection_that_follows_the_query_shows_in_the_distances_and_not_in_the_entropy() -> None:
    recorder, (layer,) = listen(1)
    layer.observer(make_gates(1, 400), choose_always(lambda own: (own - 3, own - 2)), None)
    (found,) = recorder.read().layers
    assert found.entropy > 0.95
    assert found.distance == 2.5
    assert list(found.distances) == [0, 1] + [0] * 8


def test_shut_and_open_gates_count_as_saturated() -> None:
    recorder, (layer,) = listen(1)
    gates = make_gates(1, 90)
    gates[..., 0], gates[..., 1], gates[..., 2] = 0.0, 1.0, 0.5
    layer.observer(gates, choose(1, 90, SPEC), None)
    (found,) = recorder.read().layers
    assert found.gate_mean == {"cmp": 0, "sel": 1, "win": 0.5}
    assert found.gate_saturated == {"cmp": 1, "sel": 1, "win": 0}
    assert found.gate_std == {"cmp": 0, "sel": 0, "win": 0}


@pytest.mark.parametrize("length", [1, 3, 20])
def test_where_no_query_can_choose_nothing_is_said_of_choices(length: int) -> None:
    recorder, (layer,) = listen(1)
    layer.observer(make_gates(1, length), choose(1, length, SPEC), None)
    (found,) = recorder.read().layers
    assert (found.choosing, found.entropy, found.overlap, found.distance) == (0, None, None, None)
    assert found.distances == []
    assert 0 < found.forced <= 1


def test_bfloat16_gates_are_averaged_in_float32() -> None:
    recorder, (layer,) = listen(1)
    gates = make_gates(8, 500).bfloat16()
    layer.observer(gates, choose(1, 500, SPEC).expand(8, -1, -1, -1), None)
    expected = gates.double().mean((0, 1, 2)).tolist()
    assert list(recorder.read().gates.values()) == pytest.approx(expected, abs=1e-5)


def test_only_the_first_pass_since_arming_counts() -> None:
    recorder, (layer,) = listen(1)
    said = make_gates(1, 90), choose(1, 90, SPEC)
    layer.observer(*said, None)
    layer.observer(make_gates(1, 90, seed=5), choose(1, 90, SPEC, seed=5), None)
    assert_same(recorder.read(), [by_hand(*said, SPEC, None)])
    assert layer.observer is None
    assert recorder.read() is None, "a reading is of what came since the last"


def test_a_recorder_without_layers_has_nothing_to_say() -> None:
    recorder = HealthRecorder({}, None)
    recorder.arm()
    assert recorder.read() is None


def test_listening_keeps_no_activation_alive() -> None:
    recorder, (layer,) = listen(1)
    gates, blocks = make_gates(1, 90), choose(1, 90, SPEC)
    storages = [StorageWeakRef(x.untyped_storage()) for x in (gates, blocks)]
    layer.observer(gates, blocks, None)
    del gates, blocks
    assert all(storage.expired() for storage in storages)
    assert recorder.read() is not None


def test_measuring_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta` fetching a value is an error; the reading is one tensor's transfer."""
    recorder, layers = listen(3)
    gates, blocks = make_gates(1, 90).to("meta"), choose(1, 90, SPEC).to("meta")
    transfers = []
    monkeypatch.setattr(Tensor, "tolist", lambda rows: transfers.append(rows.shape) or [])
    for layer in layers:
        layer.observer(gates, blocks, packed(40, 50).to("meta"))
    assert recorder.read() == Health([])
    assert len(transfers) == 1


def test_what_cannot_be_measured_costs_the_figures_and_not_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorder, layers = listen(2)
    layers[0].observer(make_gates(1, 90), torch.zeros(0, dtype=torch.int32), None)
    assert [layer.observer for layer in layers] == [None, None]
    assert recorder.read() is None
    recorder.arm()
    assert [layer.observer for layer in layers] == [None, None]
    assert recorder.read() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nsa: the health of layers is off for the rest of the run: ")
