"""GPU benchmarks at tiny sizes: their results are complete and consistent, errors included."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.bench import baselines, module, train
from nsa.bench.__main__ import main
from nsa.bench.baselines import block_mask, compiled_flex, flex
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
from nsa.bench.results import Report, figure, to_json
from nsa.bench.roofline import pairs
from nsa.bench.timing import (
    Sample,
    Timing,
    peak_bytes,
    summarize,
    time_alternating,
    time_once,
)
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
    assert [row["function"] for row in results["rows"]] == list(FUNCTIONS)
    for row in results["rows"]:
        assert (row["length"], row["batch"], row["heads"]) == (96, 2, [4, 2, 16, 16])
        for result in row["implementations"].values():
            assert result["errors"] == {}
            assert (result["forward"]["clock"] == "wall") == (device == "cpu")
            differentiable = row["function"] != "select_blocks"
            assert (result["forward_backward"] is not None) == differentiable
            for what in ("forward", "forward_backward")[: 1 + differentiable]:
                ms = figure(result, what)
                assert ms is not None
                assert result["tflops"][what] == pytest.approx(row["flops"][what] / ms / 1e9)
                assert result["gbps"][what] == pytest.approx(row["bytes"][what] / ms / 1e6)


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
    forward = {name: figure(result, "forward") for name, result in parts["implementations"].items()}
    assert set(forward) == set(FUNCTIONS)
    assert parts["forward_fraction"] == {
        name: pytest.approx(forward[name] / forward["nsa_attention"]) for name in PARTS
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
    for library in baselines.LIBRARIES:
        version, failed = results["libraries"][library], dense | peers
        if "cannot be imported" in version and library in failed:
            assert version in failed[library]


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


def test_steps_alternate() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    timings, failures = time_alternating(steps, CPU, seconds=1, rounds=4)
    assert order[6:] == list("abcabcabcabc")  # after two warm-up calls each
    assert {name: timing.rounds for name, timing in timings.items()} == dict.fromkeys("abc", 4)
    assert failures == {}


def test_cases_beyond_the_time_limit_are_visible(bench: Bench) -> None:
    results = bench("kernels", "--device", "cpu", "--shapes", "4x2x16", "--lengths", "64,128",
                  "--tokens", "64", "--limit", "0")  # fmt: skip
    assert results["rows"] == []
    assert not results["finished"]
    assert [case["case"] for case in results["skipped"]] == ["4x2x16 T=64", "4x2x16 T=128"]
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


@pytest.mark.parametrize("length", [100, 1100])
def test_the_block_sparse_mask_is_causal_and_as_sparse_as_the_pattern(length: int) -> None:
    spec = NSASpec(select_len=64, select_top=4, window=128)  # two blocks of 128, and one of window
    inputs = Inputs.random(shapes("2x1x8")[0], 1, length, spec, CPU, torch.float32)
    torch.manual_seed(1)
    visible = block_mask(length, spec, CPU).to_dense()[0, 0].bool()
    row = torch.arange(len(visible))
    assert visible.sum(-1).max() <= 1 + 2 + 1  # own, selected, window
    assert visible.diagonal().all()
    assert visible[row[1:], row[1:] - 1].all()
    assert not visible.triu(1).any()
    mask = visible.repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length].tril()
    torch.manual_seed(1)
    o = flex(inputs, spec).forward()
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k_sel, inputs.v_sel))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(o, expected.transpose(1, 2))


def test_flex_attention_is_compiled_for_each_length_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One kernel for all lengths would mask every tile."""
    graphs: list[list[bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append([isinstance(x, torch.SymInt) for x in inputs])
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **kw: compile(*a, **kw, backend=backend))
    attend = compiled_flex()
    for length in (128, 256, 384):
        q = torch.randn(1, 1, length, 16)
        attend(q, q, q, block_mask=block_mask(length, None, CPU))
    assert len(graphs) == 3
    assert not any(map(any, graphs))


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


@pytest.mark.gpu
def test_small_kernels_are_timed_without_the_hosts_gaps() -> None:
    """Two hundred additions of 16 numbers: queuing one takes longer than running it."""
    device = torch.device("cuda")
    x = torch.zeros(16, device=device)

    def step() -> None:
        for _ in range(200):
            x.add_(1)

    step()
    unspun = time_once(step, device)
    spun = time_once(step, device, 2 * unspun.host_ms)
    assert unspun.clock == "host"
    assert spun.clock == "device"
    assert 0 < spun.ms < 0.8 * unspun.ms
    assert time_alternating({"add": step}, device, rounds=5)[0]["add"].clock == "device"


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_says_so() -> None:
    device = torch.device("cuda")
    x = torch.zeros(16, device=device)
    timings, _ = time_alternating({"item": lambda: x.sum().item()}, device, rounds=3)
    assert timings["item"].clock == "host"


def test_a_timing_has_the_clock_of_most_rounds() -> None:
    fast, slow = Sample(1.0, "device", 0.1), Sample(3.0, "host", 2.0)
    assert summarize([fast, slow, fast]) == Timing(1.0, 1.0, 3.0, 3, "device")
    assert summarize([fast, slow, slow]).clock == "host"
    assert summarize([fast, slow]).clock == "host"
    assert time_once(lambda: time.sleep(0.002), CPU).clock == "wall"


@pytest.mark.gpu
def test_peak_memory_is_what_a_step_allocates_plus_what_it_holds() -> None:
    device = torch.device("cuda")
    held = torch.empty(2**20, device=device)
    others = torch.empty(2**24, device=device)
    peak = peak_bytes(lambda: torch.empty(2**22, device=device), [held, held.detach()], device)
    assert peak == 4 * (2**22 + 2**20)
    del others


@pytest.mark.gpu
def test_fla_computes_the_same_as_nsa_with_its_pattern() -> None:
    pytest.importorskip("fla", reason="fla-core is not installed")
    shape, device = shapes("32x2x64")[0], torch.device("cuda")
    inputs = Inputs.random(shape, 1, 2048, baselines.FLA_SPEC, device, torch.bfloat16)
    built = module._same_pattern(inputs, shape, "triton")
    for ending in ("", "-with-window"):
        ours, theirs = (built[f"{name}{ending}"]().forward() for name in ("nsa", "fla"))
        assert difference(theirs, ours) < 0.02  # bf16, and near-ties selected differently


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
print(nsa.bench.baselines.versions()["fla"])
"""


def test_the_library_and_its_benchmarks_import_with_torch_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fla-core cannot be imported" in done.stdout


def test_json_has_one_line_per_row() -> None:
    result = {"a": 1, "rows": [{"b": [1, 2]}, {"b": None}], "none": []}
    text = to_json(result)
    assert json.loads(text) == result
    assert text.splitlines()[2:5] == [' "rows": [', '  {"b": [1, 2]},', '  {"b": null}']
