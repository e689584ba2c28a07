"""`nsa.bench decode`: what it times is decoding, and the bytes that it counts exist."""

from __future__ import annotations

import json
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa.bench.__main__ import main
from nsa.bench.decode import _decode, _dense, _graph, random_cache
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.cache import cache_bytes
from tests.ops.cases import one_thread as one_thread
from tests.ops.cases import threads

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three of four cases; the fourth exceeds --tokens."""
    out = tmp_path_factory.mktemp("decode") / "figures.json"
    with threads(1):
        main(["decode", "--device", "cpu", "--seconds", "0.001", "--rounds", "1", "--out", str(out),
              "--lengths", "100,1100", "--batches", "1,2", "--tokens", "1200", "--layers", "1",
              "--vocab", "64"])  # fmt: skip
    return json.loads(out.read_text())


def test_every_case_within_the_token_limit_is_measured(results: dict[str, Any]) -> None:
    assert results["finished"]
    assert results["environment"]["command"].startswith("python -m nsa.bench decode --device cpu")
    assert {"torch", "python", "date", "processor"} <= set(results["environment"])
    assert [(row["length"], row["batch"]) for row in results["rows"]] == [
        (100, 1),
        (1100, 1),
        (100, 2),
    ]
    for row in results["rows"]:
        for result in row["implementations"].values():
            assert result["errors"] == {}
            assert result["step_ms"] == pytest.approx(result["step_timing"]["median"] / 16)
            assert result["tokens_per_s"] == pytest.approx(row["batch"] / result["step_ms"] * 1e3)
        nsa, dense = (row["implementations"][kind] for kind in ("nsa", "dense"))
        for what, over in row["dense_over_nsa"].items():
            assert over == pytest.approx(dense[what] / nsa[what])


def test_bytes_read_and_cached_are_counted_in_the_measured_dtype(
    results: dict[str, Any],
) -> None:
    """One layer of M7C in float32."""
    pair = 2 * (64 + 64) * 4
    _, long, batch = results["rows"]
    blocks = (1100 - 32) // 16 + 1
    selected = 15 * 64 + 1100 - 17 * 64  # the last block is partial
    nsa, dense = (long["implementations"][kind] for kind in ("nsa", "dense"))
    assert nsa["read_bytes_per_token"] == pair * (blocks + selected + 512)
    assert nsa["cache_bytes"] == pair * (1100 + blocks + 512 + 32)
    assert dense["read_bytes_per_token"] == dense["cache_bytes"] == pair * 1100
    for row in (long, batch):
        for kind, result in row["implementations"].items():
            config = ModelConfig(layers=1, attention=AttentionConfig(kind=kind))
            capacity = result["cache_bytes_measured"]["capacity"]
            expected = row["batch"] * cache_bytes(config, capacity, torch.float32)
            assert result["cache_bytes_measured"]["bytes"] == expected
            assert result["cache_bytes_per_token"] == result["cache_bytes"] / row["length"]


def small(kind: str) -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(
        ModelConfig(
            vocab_size=50, layers=1, width=16, heads=4, kv_heads=2, head_dim=4, value_dim=6,
            mlp_width=8, attention=AttentionConfig(kind=kind),
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["nsa", "dense"])
@torch.no_grad()
def test_every_round_decodes_the_same_tokens_from_the_same_length(kind: str) -> None:
    model = small(kind)
    cache = random_cache(model.config, 90, 3, 106, torch.float32, CPU)
    first = _decode(model, cache, 90, 16)
    assert (cache.host_lengths, cache.capacity) == ([106] * 3, 106)
    assert torch.equal(_decode(model, cache, 90, 16), first)
    assert cache.host_lengths == [106] * 3


def test_dense_attention_alone_equals_softmax_over_the_context() -> None:
    cache = random_cache(small("dense").config, 20, 2, 36, torch.float32, CPU)
    torch.manual_seed(3)
    o = _dense(cache, 20)()
    torch.manual_seed(3)
    q = torch.randn(2, 4, 4)
    k, v = (
        cache.layers[0].read(name)[:, :20].repeat_interleave(2, 2) for name in ("k_all", "v_all")
    )
    p = (torch.einsum("bhd,bnhd->bhn", q, k) / 2).softmax(-1)
    assert isinstance(o, Tensor)
    torch.testing.assert_close(o.flatten(1, 2), torch.einsum("bhn,bnhd->bhd", p, v))


def test_a_cuda_graph_keeps_its_inputs_alive() -> None:
    lengths = torch.tensor([3])
    read = weakref.ref(lengths)
    with (
        mock.patch.multiple(
            torch.cuda,
            **dict.fromkeys(("Stream", "stream", "current_stream", "graph"), mock.DEFAULT),
        ),
        mock.patch.object(torch.cuda, "CUDAGraph") as graph,
    ):
        replay = _graph(partial(torch.neg, lengths))
    del lengths
    replay()
    graph().replay.assert_called_once_with()
    assert read() is not None
    del replay
    assert read() is None
