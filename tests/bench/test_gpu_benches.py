"""The GPU benchmarks at tiny sizes: what they write is complete, adds up, and hides nothing."""

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

from nsa.bench import module, peers, train
from nsa.bench.__main__ import main
from nsa.bench.calls import Chosen, pairs
from nsa.bench.contenders import Contender, difference, figure, measure
from nsa.bench.dense import block_mask, compiled, flex
from nsa.bench.gpu import elapsed_ms, peak_bytes, take_turns
from nsa.bench.inputs import Inputs, mean_pool, neighbour_overlap, selection
from nsa.bench.report import Report
from nsa.bench.shapes import FUNCTIONS, PARTS, shapes
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
    """Run a verb; what it left on disk."""

    def run(verb: str, *flags: str) -> dict[str, Any]:
        out = tmp_path / "figures.json"
        main([verb, *QUICK, "--out", str(out), *flags])
        return json.loads(out.read_text())

    return run


def report(**changed: Any) -> Report:
    """One that nobody asked for on the command line."""
    flags = {"device": "cpu", "dtype": None, "limit": None, "out": None, "arguments": []}
    return Report(argparse.Namespace(**{**flags, "seconds": 0.001, "rounds": 1, **changed}))


def reasons(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: " ".join(one["why_not"].values()) for name, one in found.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_gives_times_and_rates_of_every_function(bench: Bench, device: str) -> None:
    found = bench("kernels", "--device", device, "--shapes", "4x2x16", "--lengths", "96",
                  "--tokens", "192", "--backends", "blockwise,reference")  # fmt: skip
    assert found["finished"]
    assert found["environment"]["command"].startswith("python -m nsa.bench kernels --seconds")
    assert {"torch", "python", "date"} <= set(found["environment"])
    assert {"device", "triton"} <= set(found["environment"]["hardware"])
    assert found["ceilings"]["matrix_product_tflops"] > 0
    assert [row["function"] for row in found["rows"]] == list(FUNCTIONS)
    for row in found["rows"]:
        assert (row["length"], row["batch"], row["heads"]) == (96, 2, [4, 2, 16, 16])
        for one in row["contenders"].values():
            assert one["why_not"] == {}
            learns = row["function"] != "select_blocks"
            assert (one["forward_backward"] is not None) == learns
            for what in ("forward", "forward_backward")[: 1 + learns]:
                ms = figure(one, what)
                assert ms is not None
                assert one["tflops"][what] == pytest.approx(row["flops"][what] / ms / 1e9)
                assert one["gbps"][what] == pytest.approx(row["bytes"][what] / ms / 1e6)


def test_counted_pairs_are_those_that_each_branch_sees() -> None:
    length, shape = 53, shapes("6x2x8")[0]
    inputs = Inputs.of(shape, 2, length, SMALL, CPU, torch.float32)
    chosen = Chosen.of(inputs, SMALL, "blockwise")
    index = chosen.index.numpy()
    by_hand = {
        "compressed_attention": 2 * 6 * sum(
            len(naive.compressed_seen(t, length, SMALL)) for t in range(length)
        ),
        "window_attention": 2 * 6 * sum(
            len(naive.window_seen(t, length, SMALL.window)) for t in range(length)
        ),
        "selected_attention": 3 * sum(
            len(naive.selected_seen(t, length, [j for j in index[b, t, h] if j >= 0], SMALL))
            for b, t, h in np.ndindex(2, length, 2)
        ),
    }  # fmt: skip
    assert {name: pairs(name, inputs, chosen.index, SMALL) for name in by_hand} == by_hand


@pytest.mark.parametrize("device", DEVICES)
def test_ratios_are_quotients_of_times_in_the_same_case(bench: Bench, device: str) -> None:
    found = bench("module", "--device", device, "--shapes", "4x2x16", "--lengths", "128",
                  "--tokens", "128", "--backend", "blockwise")  # fmt: skip
    whole, same, selected, parts = found["rows"]
    kinds = ["module", "same-pattern", "selected", "parts"]
    assert [row["kind"] for row in found["rows"]] == kinds
    assert set(whole["neighbour_overlap"]) == {"nsa", "nsa-local"}
    assert set(whole["contenders"]) == {
        *("nsa", "nsa-local", "sdpa-flash", "sdpa-cudnn", "flex-causal", "flex-blocks"),
        "native-sparse-attention-pytorch",
    }
    assert "nsa" not in whole["ratios"]
    assert set(selected["contenders"]) == {"nsa-random", "nsa-local", "fla-random", "fla-local"}
    bases = {f"fla-{what}": f"nsa-{what}" for what in ("with-window", "random", "local")}
    for row in (whole, same, selected):
        for name, ratios in row["ratios"].items():
            base = row["contenders"]["nsa" if row is whole else bases.get(name, "nsa")]
            for what in ("forward", "forward_backward", "peak_bytes"):
                this, other = figure(row["contenders"][name], what), figure(base, what)
                expected = None if this is None or other is None else this / other
                assert ratios[what] == (expected and pytest.approx(expected))
    assert whole["ratios"]["sdpa-flash"]["forward_backward"] > 0
    allowed = 1e-5 if device == "cpu" else 0.01  # fp32, bf16
    assert whole["contenders"]["flex-causal"]["difference"]["relative"] < allowed
    forward = {name: figure(one, "forward") for name, one in parts["contenders"].items()}
    assert set(forward) == set(FUNCTIONS)
    assert parts["forward_share"] == {
        name: pytest.approx(forward[name] / forward["nsa_attention"]) for name in PARTS
    }


def test_who_has_no_time_has_a_reason(bench: Bench) -> None:
    """Absent peers, kernels that need a GPU, and shapes that a peer does not take."""
    found = bench("module", "--device", "cpu", "--shapes", "12x2x16", "--lengths", "64",
                  "--tokens", "64", "--kinds", "module,same-pattern", "--selection", "random",
                  "--only", "sdpa-cudnn,fla,native-sparse-attention-pytorch")  # fmt: skip
    for row in found["rows"]:
        for name, one in row["contenders"].items():
            for what in ("forward", "forward_backward"):
                assert one[what] is not None or one["why_not"].get(what) or one["why_not"]["all"], (
                    name
                )
    whole, same = (reasons(row["contenders"]) for row in found["rows"])
    assert "sdpa-cudnn" in whole["sdpa-cudnn"]
    assert "group of 16" in same["fla"]
    for peer in peers.PEERS:
        known = found["peers"][peer]
        assert (known["version"] is None) == bool(known["absent"])
        if known["absent"] and peer in whole:
            assert "cannot be imported" in whole[peer]


def test_one_contender_that_fails_leaves_the_others_their_figures() -> None:
    def broken(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def unlearned(x: Tensor) -> Tensor:
        return x.detach() * 2

    x, shape = torch.randn(2, 3), shapes("2x1x8")[0]
    inputs = Inputs.of(shape, 1, 16, SMALL, CPU, torch.float32)
    found = measure(
        {
            "built wrong": lambda: Contender(torch.add),
            "broken": lambda: Contender(broken, x),
            "forward only": lambda: Contender(unlearned, x),
            "fine": lambda: Contender(torch.exp, x),
            "refused": lambda: peers.fla(inputs, shape, SMALL, window=False),
        },
        report(),
    )
    assert figure(found["fine"], "forward") is not None
    assert figure(found["fine"], "forward_backward") is not None
    assert found["fine"]["why_not"] == {}
    assert figure(found["forward only"], "forward") is not None
    assert "grad" in found["forward only"]["why_not"]["forward_backward"]
    assert "OutOfMemoryError: CUDA out of memory" in found["broken"]["why_not"]["forward"]
    assert found["broken"]["forward"] is None
    assert "one block size" in found["refused"]["why_not"]["all"]


def test_how_far_outputs_are_apart_is_relative_and_over_all_of_them() -> None:
    x, y = torch.randn(2, 5000, 1, 3), torch.randn(2, 5000, 1, 3)
    assert difference(x, y) == pytest.approx(((x - y).norm() / y.norm()).item())


def test_contenders_take_turns() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    timings, failed = take_turns(steps, CPU, seconds=1, rounds=4)
    assert order[6:] == list("abcabcabcabc")  # after two calls each that warm up
    assert {name: timing.turns for name, timing in timings.items()} == dict.fromkeys("abc", 4)
    assert failed == {}


def test_cases_for_which_there_is_no_time_are_listed(bench: Bench) -> None:
    found = bench("kernels", "--device", "cpu", "--shapes", "4x2x16", "--lengths", "64,128",
                  "--tokens", "64", "--limit", "0")  # fmt: skip
    assert found["rows"] == []
    assert not found["finished"]
    assert [one["case"] for one in found["skipped"]] == ["4x2x16 T=64", "4x2x16 T=128"]
    assert "--limit 0 s over" in found["skipped"][0]["why"]


def test_a_case_that_fails_ends_neither_the_run_nor_the_file(tmp_path: Path) -> None:
    one = report(out=tmp_path / "figures.json")

    def fails() -> None:
        raise RuntimeError("out of memory")

    one.attempt("first", lambda: one.add({"case": "first"}))
    now = json.loads((tmp_path / "figures.json").read_text())  # as if it were ended here
    assert (now["rows"], now["finished"]) == ([{"case": "first"}], False)
    one.attempt("second", fails)
    now = json.loads((tmp_path / "figures.json").read_text())
    assert now["skipped"] == [{"case": "second", "why": "RuntimeError: out of memory"}]
    one.attempt("third", lambda: one.add({"case": "third"}))
    assert one.finish()["finished"] is False
    assert len(json.loads((tmp_path / "figures.json").read_text())["rows"]) == 2


@pytest.mark.parametrize("length", [5, 32, 200])
@pytest.mark.parametrize("content", ["random", "local"])
def test_given_selections_are_ones_that_select_blocks_could_make(content: str, length: int) -> None:
    index = selection(content, 2, length, 3, SMALL, CPU)
    assert index.shape == (2, length, 3, 4)
    assert index.dtype == torch.int32
    for t, head in np.ndindex(length, 3):
        own = t // SMALL.select_len
        blocks = [j for j in index[1, t, head].tolist() if j >= 0]
        assert blocks == sorted(set(blocks))
        assert len(blocks) == min(own + 1, SMALL.select_top)
        assert {0, own, max(own - 1, 0)} <= set(blocks)
        assert blocks[-1] == own
        assert index[1, t, head, len(blocks) :].tolist() == [-1] * (4 - len(blocks))


def test_neighbours_share_more_of_a_local_selection_than_of_a_random_one() -> None:
    wide = NSASpec(select_len=8, select_top=12, local_blocks=2, block_len=8, block_stride=4)
    share = {
        content: neighbour_overlap(selection(content, 1, 800, 2, wide, CPU))
        for content in ("random", "local")
    }
    assert share["random"] < 0.55
    assert share["local"] > 0.85
    same = torch.tensor([[[[0, 1]], [[0, 1]], [[0, 2]], [[1, 2]]]])
    assert neighbour_overlap(same) == pytest.approx((2 + 1 + 1) / 6)


def test_neighbours_that_are_alike_choose_alike() -> None:
    spec = NSASpec(select_top=4, local_blocks=1)
    inputs = Inputs.of(shapes("2x1x16")[0], 1, 1024, spec, CPU, torch.float32)
    alike = inputs.local(spec)
    assert torch.equal(alike.k_cmp, inputs.k_cmp)
    for given, low, high in ((inputs, 0, 0.75), (alike, 0.85, 1)):
        assert low < neighbour_overlap(Chosen.of(given, spec, "blockwise").index) < high


def test_compressed_keys_are_the_means_of_their_blocks() -> None:
    x = torch.randn(2, 29, 3, 4)
    for spec in (SMALL, NSASpec(block_len=8, block_stride=8, select_len=8)):
        pooled = mean_pool(x, spec)
        starts = [i * spec.block_stride for i in range(spec.compressed_len(29))]
        by_hand = torch.stack([x[:, a : a + 8].mean(1) for a in starts], 1)
        torch.testing.assert_close(pooled, by_hand)
    assert mean_pool(x[:, :7], SMALL).shape == (2, 0, 3, 4)


@pytest.mark.parametrize("length", [100, 1100])
def test_the_block_sparse_mask_is_causal_and_as_sparse_as_the_pattern(length: int) -> None:
    spec = NSASpec(select_len=64, select_top=4, window=128)  # two blocks of 128, and one of window
    inputs = Inputs.of(shapes("2x1x8")[0], 1, length, spec, CPU, torch.float32)
    torch.manual_seed(1)
    listed = block_mask(length, spec, CPU).to_dense()[0, 0].bool()
    row = torch.arange(len(listed))
    assert listed.sum(-1).max() <= 1 + 2 + 1  # own, chosen, window
    assert listed.diagonal().all()
    assert listed[row[1:], row[1:] - 1].all()
    assert not listed.triu(1).any()
    seen = listed.repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length].tril()
    torch.manual_seed(1)
    o = flex(inputs, spec).forward()
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k_sel, inputs.v_sel))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(o, expected.transpose(1, 2))


def test_flex_attention_is_compiled_for_each_length_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel for any length masks every tile, and would be slower than it could be."""
    made: list[list[bool]] = []

    def backend(graph: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        made.append([isinstance(x, torch.SymInt) for x in given])
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **kw: compile(*a, **kw, backend=backend))
    attend = compiled()
    for length in (128, 256, 384):
        q = torch.randn(1, 1, length, 16)
        attend(q, q, q, block_mask=block_mask(length, None, CPU))
    assert len(made) == 3
    assert not any(map(any, made))


def test_a_plot_without_what_draws_it_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "figures.json"
    with pytest.raises(ValueError, match=r"--plot \S*lines.png needs matplotlib: pip install"):
        main(["module", *QUICK, "--device", "cpu", "--shapes", "4x2x16", "--lengths", "128",
              "--tokens", "128", "--out", str(out), "--plot", str(tmp_path / "lines.png"),
        ])  # fmt: skip
    assert not out.exists()


@pytest.mark.parametrize("device", DEVICES)
def test_train_measures_both_twins(bench: Bench, device: str) -> None:
    found = bench("train", "--device", device, "--lengths", "16", "--tokens", "32",
                  "--layers", "1", "--vocab", "32", "--backend", "blockwise")  # fmt: skip
    (row,) = found["rows"]
    assert (row["batch"], row["layers"], row["vocab_size"]) == (2, 1, 32)
    for one in row["contenders"].values():
        assert one["why_not"] == {}
        assert one["tokens_per_s"] == pytest.approx(32 / one["step_ms"]["median"] * 1e3)
        assert (one["peak_bytes"] is None) == (device == "cpu")
    nsa, dense = row["contenders"]["nsa"], row["contenders"]["dense"]
    over = row["nsa_over_dense"]["tokens_per_s"]
    assert over == pytest.approx(nsa["tokens_per_s"] / dense["tokens_per_s"])
    if device == "cpu":
        assert nsa["mfu"] is None
        assert all(goal["reached"] is None for goal in found["goals"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_step_trains(dtype: torch.dtype) -> None:
    config = ModelConfig(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=32,
                         vocab_size=16)  # fmt: skip
    trainer = train.Trainer(config, CPU, dtype, compiled=False)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2
    ids = torch.arange(16)[None]
    labels = (ids + 1) % 16
    losses = []
    for _ in range(12):
        trainer.step(ids, labels)
        with torch.no_grad():
            losses.append(trainer.model(ids, labels=labels).item())
    assert losses[-1] < 0.5 * losses[0]


def test_what_a_program_asks_of_a_chip_is_refused_by_name(bench: Bench) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cuda"):
            bench("train", "--device", "cuda")
    for flags, said in (
        (["module", "--shapes", "12x5x64"], "heads a multiple of KV heads"),
        (["kernels", "--lengths", "8m"], "8k for 8,192"),
        (["module", "--kinds", "modules"], "same-pattern"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "nsa.bench", *flags], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.gpu
def test_a_gpu_step_is_timed_by_the_device() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    elapsed_ms(lambda: x @ x, device)
    began = time.perf_counter()
    ms = elapsed_ms(lambda: [x @ x for _ in range(20)], device)
    assert 0 < ms <= (time.perf_counter() - began) * 1e3


@pytest.mark.gpu
def test_peak_memory_is_what_a_step_allocates_and_what_it_owns() -> None:
    device = torch.device("cuda")
    owned = torch.empty(2**20, device=device)
    others = torch.empty(2**24, device=device)
    peak = peak_bytes(lambda: torch.empty(2**22, device=device), [owned, owned.detach()], device)
    assert peak == 4 * (2**22 + 2**20)
    del others


@pytest.mark.gpu
def test_fla_computes_what_it_is_compared_with() -> None:
    pytest.importorskip("fla", reason="fla-core is not installed")
    shape, device = shapes("32x2x64")[0], torch.device("cuda")
    inputs = Inputs.of(shape, 1, 2048, peers.FLA_SPEC, device, torch.bfloat16)
    built = module._same_pattern(inputs, shape, "triton")
    for ending in ("", "-with-window"):
        ours, theirs = (built[f"{name}{ending}"]().forward() for name in ("nsa", "fla"))
        assert difference(theirs, ours) < 0.02  # bf16, and near-ties chosen otherwise


PROBE = """
import sys
blocked = ("deepspeed", "datasets", "transformers", "tensorboard", "flash_attn", "matplotlib",
           "triton", "fla", "native_sparse_attention_pytorch")
for name in blocked:
    sys.modules[name] = None
import nsa.ops, nsa.model
for name in ("calls", "contenders", "dense", "flags", "goals", "gpu", "inputs", "kernels",
             "module", "peers", "report", "shapes", "train", "tune", "__main__"):
    __import__(f"nsa.bench.{name}")
print(nsa.bench.peers.versions()["fla"]["absent"])
"""


def test_nothing_but_torch_is_needed_to_import_the_library_and_its_benchmarks() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fla-core cannot be imported" in done.stdout
