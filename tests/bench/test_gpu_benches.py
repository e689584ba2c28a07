"""GPU benchmarks at tiny sizes: their results are complete and consistent, errors included."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.model import ModelConfig
from nsa.ops import NSASpec
from nsa.ops.tune import parse_heads
from tests.bench import decode, module, peers, profile, train
from tests.bench.__main__ import main
from tests.bench.harness import Report, figure
from tests.bench.module import difference, local, random_inputs, select
from tests.ops.cases import one_thread as one_thread
from tests.ranks import ROOT, spawn_ranks

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Run a benchmark; return its JSON."""

    def run(name: str, *flags: str) -> dict[str, Any]:
        out = tmp_path / f"{name}.json"
        main([name, "--seconds=0", f"--out={out}", *flags])
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize("device", DEVICES)
def test_ratios_of_attention_are_quotients_of_times_in_the_same_case(
    bench: Bench, device: str
) -> None:
    results = bench("module", f"--device={device}", "--shapes=4x2x16", "--lengths=128",
                    "--tokens=128", "--backend=blockwise")  # fmt: skip
    assert results["finished"]
    assert results["environment"]["command"].startswith("python -m tests.bench module --seconds=0")
    assert [row["kind"] for row in results["rows"]] == list(module.KINDS)
    for row in results["rows"]:
        for name, ratios in row["ratios"].items():
            base = "nsa_attention" if row["kind"] == "parts" else "nsa"
            for what in ("forward", "forward_backward", "peak_bytes"):
                this, other = (figure(row["implementations"][x], what) for x in (name, base))
                expected = None if this is None or other is None else this / other
                assert ratios[what] == (expected and pytest.approx(expected))
        for name, result in row["implementations"].items():  # a missing library is an error
            assert result["forward"] or "".join(result["errors"].values()), name
    dense, peers, same, parts = (row["implementations"] for row in results["rows"])
    assert set(dense) == {"nsa", "nsa-local", "index", "index-local", *module.AGAINST} - {
        "flex-flash"
    }
    assert dense["index"]["kernels"][0]["ms"] > 0
    allowed = 1e-5 if device == "cpu" else 0.01  # fp32, bf16
    assert dense["flex-causal"]["difference"]["relative"] < allowed
    assert "group of 16" in same["fla"]["errors"]["all"]
    assert set(peers) == {"nsa", "scalable-flash-nsa", "flash-sparse-attention"}
    functions = {"compressed_attention", "select_blocks", "selected_attention", "window_attention"}
    assert set(parts) == {"nsa_attention", *functions}
    assert parts["select_blocks"]["forward_backward"] is None


@pytest.mark.gpu
def test_fla_computes_the_same_as_nsa_with_its_pattern() -> None:
    pytest.importorskip("fla", reason="fla-core is not installed")
    heads, report = parse_heads("32x2x64"), Report(Namespace(device="cuda", out=None))
    inputs = random_inputs(heads, 1, 2048, peers.FLA_SPEC, report)
    built = module.KINDS["same-pattern"](inputs, report)
    ours, theirs = (built[name]().forward() for name in ("nsa", "fla"))
    assert difference(theirs, ours) < 0.02  # bf16, and near-ties selected differently


def test_similar_neighbours_select_mostly_the_same_blocks() -> None:
    spec = NSASpec(select_top=4, local_blocks=1)
    report = Report(Namespace(device="cpu", out=None))
    inputs = random_inputs(parse_heads("2x1x16"), 1, 1024, spec, report)
    for x, low, high in ((inputs, 0, 0.75), (local(inputs, spec), 0.85, 1)):
        index = select(x, spec, "blockwise")[1]
        selected = index[:, 1:] >= 0
        same = (index[:, 1:, :, :, None] == index[:, :-1, :, None, :]).any(-1) & selected
        assert low < same.sum() / selected.sum() < high


@pytest.mark.parametrize("device", DEVICES)
def test_train_measures_nsa_an_index_and_dense(bench: Bench, device: str) -> None:
    results = bench("train", f"--device={device}", "--lengths=16", "--tokens=32", "--layers=1",
                    "--vocab=32", "--backend=blockwise", "--kinds=nsa,index,dense")  # fmt: skip
    (row,) = results["rows"]
    assert (row["batch"], row["layers"], row["vocab_size"]) == (2, 1, 32)
    for result in row["implementations"].values():
        assert result["errors"] == {}
        assert result["tokens_per_s"] == pytest.approx(32 / result["loop_ms"] * 1e3)
        assert (result["peak_bytes"] is None) == (device == "cpu")
        assert result["steps"] == train.IN_A_ROW
    index, dense = (row["implementations"][kind] for kind in ("index", "dense"))
    over = row["index_over_dense"]["tokens_per_s"]
    assert over == pytest.approx(index["tokens_per_s"] / dense["tokens_per_s"])


def test_labels_are_the_next_tokens() -> None:
    ids, labels = train.random_batch(500, 64, 16, CPU)
    assert ids.shape == labels.shape == (4, 16)
    assert torch.equal(labels[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_step_trains(dtype: torch.dtype) -> None:
    config = ModelConfig(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=32,
                         vocab_size=16)  # fmt: skip
    stepper = train.Stepper(config, CPU, dtype)
    for group in stepper.optimizer.param_groups:
        group["lr"] = 1e-2
    ids, losses = torch.arange(16)[None], []
    for _ in range(12):
        stepper.step(ids, (ids + 1) % 16)
        with torch.no_grad():
            losses.append(stepper.model(ids, labels=(ids + 1) % 16).item())
    assert losses[-1] < 0.5 * losses[0]


def test_decoding_is_measured_and_the_bytes_it_reads_are_counted(bench: Bench) -> None:
    """Three of four cases; the fourth exceeds --tokens."""
    results = bench("decode", "--device=cpu", "--lengths=100,1100", "--batches=1,2",
                    "--tokens=1200", "--layers=1", "--vocab=64")  # fmt: skip
    rows = results["rows"]
    assert [(row["length"], row["batch"]) for row in rows] == [(100, 1), (1100, 1), (100, 2)]
    for row in rows:
        *sparse, dense = (row["implementations"][kind] for kind in ("nsa", "index", "dense"))
        for name, result in zip(("nsa", "index"), sparse, strict=True):
            assert result["errors"] == dense["errors"] == {}
            assert result["attention_ms"] == result["attention_timing"]["median"]
            for what, over in row[f"dense_over_{name}"].items():
                assert over == pytest.approx(dense[what] / result[what])
    nsa, index, dense = (rows[1]["implementations"][kind] for kind in ("nsa", "index", "dense"))
    pair = 2 * (64 + 64) * 4  # of one layer of M7C, in float32
    blocks, selected = (1100 - 32) // 16 + 1, 15 * 64 + 1100 - 17 * 64  # the last block is partial
    assert nsa["read_bytes_per_token"] == pair * (blocks + selected + 512)
    assert dense["read_bytes_per_token"] == pair * 1100
    assert index["read_bytes_per_token"] == pair * 1100 + pair // 2 * 17  # all; 17 index keys


def test_dense_attention_alone_equals_softmax_over_the_context() -> None:
    config = ModelConfig(width=16, heads=4, kv_heads=2, head_dim=4, value_dim=6,
                         attention=train.KINDS["dense"])  # fmt: skip
    drawn: list[Tensor] = []

    def draw(*shape: int) -> Tensor:
        drawn.append(torch.randn(2, *shape))
        return drawn[-1]

    o = decode.attention(config, 20, draw)()
    q, k, v = drawn
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    p = (torch.einsum("bhd,bnhd->bhn", q, k) / 2).softmax(-1)
    torch.testing.assert_close(o.flatten(1, 2), torch.einsum("bhn,bnhd->bhd", p, v))


# Two steps: "a" twice per step, of which one overlaps "b"; then a gap of 4 ms.
SPANS = [
    profile.Span(name, 1000.0 * (start + shift), 1000.0 * (end + shift))
    for shift in (0, 10)
    for name, start, end in [("a", 0, 2), ("b", 1, 4), ("a", 4, 6)]
]


def test_profiled_times_and_launches_are_per_step_and_overlaps_count_once() -> None:
    result = profile.summary(SPANS, steps=2)
    assert result["busy_ms"] == pytest.approx(6)
    assert result["step_ms"] == pytest.approx(8)  # 16 ms from the first kernel to the last
    assert result["busy_fraction"] == pytest.approx(6 / 8)
    assert result["launches"] == 3
    assert [(kernel["name"], kernel["launches"], kernel["ms"]) for kernel in result["kernels"]] == [
        ("a", 2, pytest.approx(4)),
        ("b", 1, pytest.approx(3)),
    ]
    with pytest.raises(RuntimeError, match="recorded no kernel"):
        profile.summary([], steps=2)


SMALL = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_width": 32}
PROFILE = [
    *("profile", "--device=cpu", "--tokens=64", "--steps=1", "--set=data.seq_len=64"),
    *(f"--set=model.{name}={size}" for name, size in {**SMALL, "vocab_size": 64}.items()),
]


def test_a_production_step_is_profiled_in_both_phases(bench: Bench, tmp_path: Path) -> None:
    sparse, dense = bench(*PROFILE, "--engines=plain")["rows"]
    assert (sparse["phase"], dense["phase"], dense["batch"]) == ("sparse", "dense", 1)
    assert sparse["launches"] > dense["launches"] > 100
    assert 0 < sparse["busy_fraction"] <= 1
    assert (tmp_path / "profile-plain-dense.trace.json.gz").stat().st_size > 0


def test_a_step_of_deepspeeds_engine_is_profiled(tmp_path: Path) -> None:
    """In a process of its own, which joins a process group."""
    out = tmp_path / "profile.json"
    command = [*PROFILE, "--engines=zero1", "--phases=dense", f"--out={out}"]
    (rank,) = spawn_ranks(ROOT / "tests/bench/__main__.py", *command, ranks=0).started
    assert rank.wait(120) == 0, rank.text("err")
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["engine"], row["phase"]) == ("zero1", "dense")
    assert any("allreduce" in kernel["name"] for kernel in row["kernels"])


PROBE = """
import sys
blocked = ("deepspeed", "datasets", "transformers", "tensorboard", "flash_attn", "matplotlib",
           "triton", "yaml", "fla")
for name in blocked:
    sys.modules[name] = None
import nsa.ops, nsa.model
for name in ("decode", "module", "profile", "train", "__main__"):
    __import__(f"tests.bench.{name}")
"""


def test_the_library_and_its_gpu_benchmarks_import_with_torch_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
