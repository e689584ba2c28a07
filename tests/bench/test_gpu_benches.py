"""GPU benchmarks at tiny sizes: their results are complete and consistent, errors included."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa.bench import baselines, train
from nsa.bench.__main__ import main
from nsa.bench.implementations import (
    FUNCTIONS,
    PARTS,
    Implementation,
    Inputs,
    difference,
    measure,
    select,
)
from nsa.bench.options import shapes
from nsa.bench.results import Report, figure
from nsa.bench.roofline import pairs
from nsa.model import ModelConfig
from nsa.ops import NSASpec
from tests.ops import naive
from tests.ops.cases import one_thread as one_thread
from tests.ranks import ROOT

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = NSASpec(block_len=8, block_stride=4, select_len=8, select_top=4, local_blocks=2, window=20)
QUICK = ["--seconds", "0.001", "--rounds", "1"]
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run a benchmark; return its JSON."""

    def run(name: str, *flags: str) -> dict[str, Any]:
        out = tmp_path / "figures.json"
        main([name, *QUICK, "--out", str(out), *flags])
        return json.loads(out.read_text())

    return run


def report(**changed: Any) -> Report:
    flags = {"device": "cpu", "out": None}
    return Report(argparse.Namespace(**{**flags, "seconds": 0.001, "rounds": 1, **changed}))


def errors(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: " ".join(result["errors"].values()) for name, result in results.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_reports_times_and_rates_of_every_function(bench: Bench, device: str) -> None:
    results = bench("kernels", "--device", device, "--shapes", "4x2x16", "--lengths", "96",
                  "--tokens", "192", "--backends", "blockwise,reference")  # fmt: skip
    assert results["finished"]
    assert results["environment"]["command"].startswith("python -m nsa.bench kernels --seconds")
    assert {"torch", "python", "date"} <= set(results["environment"])
    assert {"device", "triton"} <= set(results["environment"]["hardware"])
    assert results["ceilings"]["matrix_product_tflops"] > 0
    (row,) = results["rows"]
    assert (row["length"], row["batch"], row["heads"]) == (96, 2, [4, 2, 16, 16])
    backends = "blockwise", "reference"
    assert list(row["implementations"]) == [f"{x} {y}" for y in backends for x in FUNCTIONS]
    for name, result in row["implementations"].items():
        assert result["errors"] == {}
        assert (result["forward"]["clock"] == "wall") == (device == "cpu")
        differentiable = not name.startswith("select_blocks")
        assert (result["forward_backward"] is not None) == differentiable
        for what in ("forward", "forward_backward")[: 1 + differentiable]:
            ms = figure(result, what)
            assert ms is not None
            assert result["tflops"][what] == pytest.approx(result["flops"][what] / ms / 1e9)
            assert result["gbps"][what] == pytest.approx(result["bytes"][what] / ms / 1e6)
    over = row["ratios"]["window_attention reference"]["forward"]
    ours, base = (row["implementations"][f"window_attention {x}"] for x in reversed(backends))
    assert over == pytest.approx(figure(ours, "forward") / figure(base, "forward"))


def test_counted_pairs_are_the_visible_ones_of_each_branch() -> None:
    length, shape = 53, shapes("6x2x8")[0]
    inputs = Inputs.random(shape, 2, length, SMALL, CPU, torch.float32)
    index = select(inputs, SMALL, "blockwise")[1].numpy()
    by_hand = {
        "compressed": 2 * 6 * sum(
            len(naive.compressed_seen(t, length, SMALL)) for t in range(length)
        ),
        "window": 2 * 6 * sum(
            len(naive.window_seen(t, length, SMALL.window)) for t in range(length)
        ),
        "selected": 3 * sum(
            len(naive.selected_seen(t, length, [j for j in index[b, t, h] if j >= 0], SMALL))
            for b, t, h in np.ndindex(2, length, 2)
        ),
    }  # fmt: skip
    assert pairs(shape, 2, length, SMALL) == by_hand


@pytest.mark.parametrize("device", DEVICES)
def test_ratios_are_quotients_of_times_in_the_same_case(bench: Bench, device: str) -> None:
    results = bench("module", "--device", device, "--shapes", "4x2x16", "--lengths", "128",
                  "--tokens", "128", "--backend", "blockwise")  # fmt: skip
    dense, peers, same, parts = results["rows"]
    kinds = ["module", "peers", "same-pattern", "parts"]
    assert [row["kind"] for row in results["rows"]] == kinds
    assert set(dense["implementations"]) == {
        *("nsa", "nsa-local", "sdpa-flash", "sdpa-cudnn", "flex-causal", "flex-blocks"),
        "native-sparse-attention-pytorch",
    }
    assert "nsa" not in dense["ratios"]
    for row in (dense, peers, same):
        for name, ratios in row["ratios"].items():
            base_name = {"fla-with-window": "nsa-with-window"}.get(name, "nsa")
            base = row["implementations"][base_name]
            for what in ("forward", "forward_backward", "peak_bytes"):
                this, other = figure(row["implementations"][name], what), figure(base, what)
                expected = None if this is None or other is None else this / other
                assert ratios[what] == (expected and pytest.approx(expected))
    assert dense["ratios"]["sdpa-flash"]["forward_backward"] > 0
    allowed = 1e-5 if device == "cpu" else 0.01  # fp32, bf16
    assert dense["implementations"]["flex-causal"]["difference"]["relative"] < allowed
    forward = {
        name.removesuffix(" blockwise"): figure(result, "forward")
        for name, result in parts["implementations"].items()
    }
    assert set(forward) == set(FUNCTIONS)
    assert parts["forward_fraction"] == {
        f"{name} blockwise": pytest.approx(forward[name] / forward["nsa_attention"])
        for name in PARTS
    }


def test_an_implementation_without_times_has_an_error(bench: Bench) -> None:
    """Missing libraries, kernels that need a GPU, and unsupported shapes."""
    results = bench("module", "--device", "cpu", "--shapes", "12x2x16", "--lengths", "64",
                  "--tokens", "64", "--kinds", "module,same-pattern,peers")  # fmt: skip
    for row in results["rows"]:
        for name, result in row["implementations"].items():
            for what in ("forward", "forward_backward"):
                assert (
                    result[what] is not None
                    or result["errors"].get(what)
                    or result["errors"]["all"]
                ), name
    dense, same, peers = (errors(row["implementations"]) for row in results["rows"])
    assert "sdpa-cudnn" in dense["sdpa-cudnn"]
    assert "group of 16" in same["fla"]
    assert results["libraries"].keys() == baselines.LIBRARIES.keys()
    for library, error in (dense | peers).items():
        if library in baselines.LIBRARIES and results["libraries"][library] is None:
            assert "cannot be imported: " in error


def test_only_the_named_baselines_are_measured(bench: Bench) -> None:
    """FlexAttention alone compiles for most of a minute on a GPU."""
    results = bench("module", "--device", "cpu", "--shapes", "4x2x16", "--lengths", "64",
                  "--tokens", "64", "--kinds", "module", "--against", "sdpa-flash")  # fmt: skip
    assert set(results["rows"][0]["implementations"]) == {"nsa", "nsa-local", "sdpa-flash"}


def test_a_failing_implementation_leaves_the_others_their_figures() -> None:
    def broken(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def without_gradient(x: Tensor) -> Tensor:
        return x.detach() * 2

    x, shape = torch.randn(2, 3), shapes("2x1x8")[0]
    inputs = Inputs.random(shape, 1, 16, SMALL, CPU, torch.float32)
    results = measure(
        {
            "wrong arguments": lambda: Implementation(torch.add),
            "broken": lambda: Implementation(broken, x),
            "forward only": lambda: Implementation(without_gradient, x),
            "fine": lambda: Implementation(torch.exp, x),
            "unsupported": lambda: baselines.fla(inputs, shape, window=False),
        },
        report(),
    )
    assert figure(results["fine"], "forward") is not None
    assert figure(results["fine"], "forward_backward") is not None
    assert results["fine"]["errors"] == {}
    assert figure(results["forward only"], "forward") is not None
    assert "grad" in results["forward only"]["errors"]["forward_backward"]
    assert "OutOfMemoryError: CUDA out of memory" in results["broken"]["errors"]["forward"]
    assert results["broken"]["forward"] is None
    assert "a group of 16" in results["unsupported"]["errors"]["all"]


def test_the_difference_of_outputs_is_relative_to_their_norm() -> None:
    x, y = torch.randn(2, 5000, 1, 3), torch.randn(2, 5000, 1, 3)
    assert difference(x, y) == pytest.approx(((x - y).norm() / y.norm()).item())


def test_cases_beyond_the_time_limit_are_visible(bench: Bench) -> None:
    results = bench("kernels", "--device", "cpu", "--shapes", "4x2x16", "--lengths", "64,128",
                  "--tokens", "64", "--limit", "0")  # fmt: skip
    assert results["rows"] == []
    assert not results["finished"]
    assert [case["case"] for case in results["skipped"]] == [
        "parts 4x2x16 T=64",
        "parts 4x2x16 T=128",
    ]
    assert "--limit 0 s over" in results["skipped"][0]["reason"]


def test_a_failing_case_ends_neither_the_run_nor_the_file(tmp_path: Path) -> None:
    benchmark = report(out=tmp_path / "figures.json")

    def fails() -> None:
        raise RuntimeError("out of memory")

    benchmark.attempt("first", lambda: benchmark.add({"case": "first"}))
    now = json.loads((tmp_path / "figures.json").read_text())  # as if the run were killed here
    assert (now["rows"], now["finished"]) == ([{"case": "first"}], False)
    benchmark.attempt("second", fails)
    now = json.loads((tmp_path / "figures.json").read_text())
    assert now["skipped"] == [{"case": "second", "reason": "RuntimeError: out of memory"}]
    benchmark.attempt("third", lambda: benchmark.add({"case": "third"}))
    benchmark.finish()
    assert benchmark.data["finished"] is False
    assert len(json.loads((tmp_path / "figures.json").read_text())["rows"]) == 2


def test_similar_neighbours_select_mostly_the_same_blocks() -> None:
    spec = NSASpec(select_top=4, local_blocks=1)
    inputs = Inputs.random(shapes("2x1x16")[0], 1, 1024, spec, CPU, torch.float32)
    local = inputs.local(spec)
    assert torch.equal(local.k_cmp, inputs.k_cmp)
    for x, low, high in ((inputs, 0, 0.75), (local, 0.85, 1)):
        index = select(x, spec, "blockwise")[1]
        selected = index[:, 1:] >= 0
        same = (index[:, 1:, :, :, None] == index[:, :-1, :, None, :]).any(-1) & selected
        assert low < same.sum() / selected.sum() < high


def test_plot_without_matplotlib_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "figures.json"
    with pytest.raises(ImportError, match="matplotlib"):
        main(["module", *QUICK, "--device", "cpu", "--shapes", "4x2x16", "--lengths", "128",
              "--tokens", "128", "--out", str(out), "--plot", str(tmp_path / "lines.png"),
        ])  # fmt: skip
    assert not out.exists()


@pytest.mark.parametrize("device", DEVICES)
def test_train_measures_nsa_and_dense(bench: Bench, device: str) -> None:
    results = bench("train", "--device", device, "--lengths", "16", "--tokens", "32",
                  "--layers", "1", "--vocab", "32", "--backend", "blockwise")  # fmt: skip
    (row,) = results["rows"]
    assert (row["batch"], row["layers"], row["vocab_size"]) == (2, 1, 32)
    for result in row["implementations"].values():
        assert result["errors"] == {}
        assert result["tokens_per_s"] == pytest.approx(32 / result["loop_ms"] * 1e3)
        assert (result["peak_bytes"] is None) == (device == "cpu")
    nsa, dense = row["implementations"]["nsa"], row["implementations"]["dense"]
    over = row["nsa_over_dense"]["tokens_per_s"]
    assert over == pytest.approx(nsa["tokens_per_s"] / dense["tokens_per_s"])
    if device == "cpu":
        assert nsa["mfu"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_step_trains(dtype: torch.dtype) -> None:
    config = ModelConfig(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=32,
                         vocab_size=16)  # fmt: skip
    stepper = train.Stepper(config, CPU, dtype)
    for group in stepper.optimizer.param_groups:
        group["lr"] = 1e-2
    ids = torch.arange(16)[None]
    labels = (ids + 1) % 16
    losses = []
    for _ in range(12):
        stepper.step(ids, labels)
        with torch.no_grad():
            losses.append(stepper.model(ids, labels=labels).item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["module", "--shapes", "12x5x64"], "heads a multiple of KV heads"),
        (["kernels", "--lengths", "8m"], "8k for 8,192"),
        (["module", "--kinds", "modules"], "same-pattern"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_a_missing_gpu_is_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="--device cuda"):
        bench("train", "--device", "cuda")


PROBE = """
import sys
blocked = ("deepspeed", "datasets", "transformers", "tensorboard", "flash_attn", "matplotlib",
           "triton", "fla", "native_sparse_attention_pytorch")
for name in blocked:
    sys.modules[name] = None
import nsa.ops, nsa.model
for name in ("baselines", "implementations", "kernels", "module", "options",
             "results", "timing", "train", "tune", "__main__"):
    __import__(f"nsa.bench.{name}")
try:
    nsa.bench.baselines.load("fla")
except ImportError as error:
    print(error)
"""


def test_the_library_and_its_benchmarks_import_with_torch_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fla-core cannot be imported" in done.stdout
