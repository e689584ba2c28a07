import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nsa.constants import BRANCHES
from nsa.monitor import health
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import LAYER_STATISTICS, LayerStatistics
from nsa.spec import NSASpec
from tests.model.models import packed

SPEC = NSASpec(4, 2, 4, 5, 1, 2, 6)
HEADS, KV_HEADS = 4, 2


def make_gates(batch: int, length: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, HEADS, 3, generator=draw).mul(3).sigmoid()


def starts_of(length: int, cu_seqlens: Tensor | None) -> list[int]:
    """Return the start of each position's document."""
    if cu_seqlens is None:
        return [0] * length
    ends = cu_seqlens.tolist()
    return [max(start for start in ends[:-1] if start <= t) for t in range(length)]


def make_blocks(
    batch: int, length: int, spec: NSASpec, cu_seqlens: Tensor | None = None, seed: int = 0
) -> Tensor:
    """Return forced and random blocks in the format of selection: ascending, padded with -1."""
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


def reference(
    gates: Tensor, blocks: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, stride: int = 1
) -> dict[str, Any]:
    """Compute a layer's statistics by docs/reference/metrics.md, one value at a time."""
    batch, length = gates.shape[:2]
    starts = starts_of(length, cu_seqlens)
    sampled = range(0, length, stride)
    values = {
        branch: gates[:, ::stride, :, index].double().flatten().tolist()
        for index, branch in enumerate(BRANCHES)
    }
    means = {branch: sum(samples) / len(samples) for branch, samples in values.items()}
    compared = shared = 0
    free: list[tuple[int, int, int]] = []  # head, block, distance
    for b in range(batch):
        for t in sampled:
            own = (t - starts[t]) // spec.select_len
            for head in range(KV_HEADS):
                picks = [pick for pick in blocks[b, t, head].tolist() if pick >= 0]
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
        least = math.log(spec.select_top - always) if mine else 0.0
        entropy = -sum(part * math.log(part) for part in parts)
        entropies.append((entropy - least) / (math.log(most - always) - least) if mine else 0.0)
    layer: dict[str, Any] = {}
    for branch, samples in values.items():
        count, mean = len(samples), means[branch]
        layer[f"gate_{branch}"] = mean
        layer[f"gate_{branch}_std"] = math.sqrt(sum((one - mean) ** 2 for one in samples) / count)
    late = sum((t - starts[t]) // spec.select_len >= spec.select_top for t in sampled)
    layer["choosing"] = late / len(sampled)
    layer["entropy"] = sum(entropies) / len(entropies) if free else None
    layer["overlap"] = shared / compared if compared else None
    layer["distance"] = sum(back for *_, back in free) / len(free) if free else None
    return layer


def assert_same(actual: list[LayerStatistics], expected: list[dict[str, Any]]) -> None:
    assert len(actual) == len(expected)
    for mine, other in zip(actual, expected, strict=True):
        assert tuple(mine) == LAYER_STATISTICS
        assert list(mine.values()) == pytest.approx([other[name] for name in mine], abs=2e-6)


def armed_recorder(layers: int, spec: NSASpec = SPEC) -> tuple[HealthRecorder, list[Any]]:
    """Return an armed recorder and its layers."""
    observed = [SimpleNamespace(observer=None) for _ in range(layers)]
    recorder = HealthRecorder({f"layer {i}": layer for i, layer in enumerate(observed)}, spec)
    recorder.arm()
    return recorder, observed


@pytest.mark.parametrize("spec", [SPEC, NSASpec(4, 2, 4, 4, 0, 1, 6), NSASpec(8, 4, 8, 5, 2, 3)])
@pytest.mark.parametrize(
    ("batch", "documents"),
    [(2, (90,)), (1, (3, 41, 0, 26, 1, 60)), (1, (9, 11)), (1, (1,))],
    ids=str,
)
def test_all_statistics_match_a_loop_over_single_values(
    spec: NSASpec, batch: int, documents: tuple[int, ...]
) -> None:
    length = sum(documents)
    cu_seqlens = packed(*documents) if len(documents) > 1 else None
    recorder, layers = armed_recorder(2, spec)
    expected = []
    for seed, layer in enumerate(layers):
        outputs = (
            make_gates(batch, length, seed),
            make_blocks(batch, length, spec, cu_seqlens, seed),
        )
        layer.observer(*outputs, cu_seqlens, None)
        expected.append(reference(*outputs, spec, cu_seqlens))
    assert_same(recorder.read(), expected)


@pytest.mark.parametrize(("batch", "most", "stride"), [(1, 40, 3), (2, 60, 4), (1, 120, 1)])
def test_long_sequences_are_sampled_at_a_fixed_stride(
    batch: int, most: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MAX_QUERIES", most)
    documents = packed(9, 50, 61) if batch == 1 else None
    recorder, (layer,) = armed_recorder(1)
    outputs = make_gates(batch, 120), make_blocks(batch, 120, SPEC, documents)
    layer.observer(*outputs, documents, None)
    assert_same(recorder.read(), [reference(*outputs, SPEC, documents, stride)])


@pytest.mark.parametrize("documents", [(90,), (3, 41, 0, 30, 1, 60), (9, 11)], ids=str)
def test_recall_matches_a_loop_over_single_values(documents: tuple[int, ...]) -> None:
    """Also of a document with fewer blocks than are selected."""
    length = sum(documents)
    cu_seqlens = packed(*documents) if len(documents) > 1 else None
    recorder, layers = armed_recorder(2)
    queries, draw = torch.arange(1, length, 7), torch.Generator().manual_seed(0)
    starts = starts_of(length, cu_seqlens)
    expected = []
    for layer in layers:
        blocks = make_blocks(1, length, SPEC, cu_seqlens)
        target = torch.zeros(1, KV_HEADS, len(queries), -(-length // SPEC.select_len))
        held = random = total = 0.0
        for place, t in enumerate(queries.tolist()):
            own = (t - starts[t]) // SPEC.select_len
            ranked = [b for b in range(own + 1) if not is_forced(b, own, SPEC)]
            for head in range(KV_HEADS):
                masses = torch.rand(len(ranked), generator=draw).tolist()
                target[0, head, place, ranked] = torch.tensor(masses)
                if own + 1 <= SPEC.select_top:
                    continue
                picks = [b for b in blocks[0, t, head].tolist() if b in ranked]
                total += sum(masses)
                held += sum(masses[ranked.index(b)] for b in picks)
                random += sum(masses) * len(picks) / len(ranked)
        layer.selector_target = queries, target
        layer.observer(make_gates(1, length), blocks, cu_seqlens, torch.tensor(0.25))
        expected.append((held / total, random / total) if total else (None, None))
    found = recorder.read()
    for layer, (recall, random) in zip(found, expected, strict=True):
        assert layer["selector_loss"] == 0.25
        assert layer["recall"] == (None if recall is None else pytest.approx(recall, abs=1e-6))
        assert layer["recall_random"] == (random and pytest.approx(random, abs=1e-6))
    assert (expected[0][0] is None) == (documents == (9, 11))


def test_bfloat16_gates_are_averaged_in_float32() -> None:
    recorder, (layer,) = armed_recorder(1)
    gates = make_gates(8, 500).bfloat16()
    gates[0, 0, 0, 2] = math.nan  # a model that diverges, which must be seen
    layer.observer(gates, make_blocks(1, 500, SPEC).expand(8, -1, -1, -1), None, None)
    expected = gates.double().mean((0, 1, 2)).tolist()
    (health,) = recorder.read()
    means = [health[f"gate_{branch}"] for branch in BRANCHES]
    assert means == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_only_the_first_pass_since_arming_counts() -> None:
    recorder, (layer,) = armed_recorder(1)
    outputs = make_gates(1, 90), make_blocks(1, 90, SPEC)
    others = make_gates(1, 90, seed=5), make_blocks(1, 90, SPEC, seed=5)
    layer.observer(*others, None, None)
    recorder.arm()
    layer.observer(*outputs, None, None)
    layer.observer(*others, None, None)
    assert_same(recorder.read(), [reference(*outputs, SPEC, None)])
    assert layer.observer is None
    assert recorder.read() == [], "a reading covers the passes since the last"


def test_a_layer_without_gates_has_none_and_the_other_statistics() -> None:
    recorder, (layer,) = armed_recorder(1)
    gates, blocks = make_gates(1, 90), make_blocks(1, 90, SPEC)
    layer.observer(None, blocks, None, None)
    expected = reference(gates, blocks, SPEC, None)
    assert_same(recorder.read(), [{x: None if "gate" in x else y for x, y in expected.items()}])


def test_samples_keep_no_activation_alive() -> None:
    recorder, (layer,) = armed_recorder(1)
    gates, blocks = make_gates(1, 90), make_blocks(1, 90, SPEC)
    hidden = torch.ones(4, requires_grad=True) * 2  # which the gradient of the loss needs
    queries = torch.arange(0, 90, 9)
    layer.selector_target = queries, torch.rand(1, KV_HEADS, len(queries), 23)
    storages = [StorageWeakRef(x.untyped_storage()) for x in (gates, blocks, hidden)]
    layer.observer(gates, blocks, None, hidden.square().sum())
    del gates, blocks, hidden
    assert all(storage.expired() for storage in storages)
    assert len(recorder.read()) == 1


def test_measuring_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta`, fetching a value is an error; reading transfers one tensor."""
    recorder, layers = armed_recorder(3)
    gates, blocks = make_gates(1, 90).to("meta"), make_blocks(1, 90, SPEC).to("meta")
    transfers = []
    monkeypatch.setattr(Tensor, "tolist", lambda rows: transfers.append(rows.shape) or [])
    for layer in layers:
        target = torch.rand(1, KV_HEADS, 10, 23, device="meta")
        layer.selector_target = torch.arange(0, 90, 9, device="meta"), target
        loss = torch.empty((), device="meta")
        layer.observer(gates, blocks, packed(40, 50).to("meta"), loss)
    assert recorder.read() == []
    assert len(transfers) == 1


def test_an_error_while_measuring_costs_the_statistics_and_not_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorder, layers = armed_recorder(2)
    layers[0].observer(make_gates(1, 90), torch.zeros(0, dtype=torch.int32), None, None)
    assert [layer.observer for layer in layers] == [None, None]
    assert recorder.read() == []
    recorder.arm()
    assert [layer.observer for layer in layers] == [None, None]
    assert recorder.read() == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nsa: layer health is off for the rest of the run: ")
