"""Benchmarks at tiny sizes: results are complete and consistent, and survive failures."""

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.model import ModelConfig
from nsa.ops import NSASpec
from tests.bench import module, peers, profile, train
from tests.bench.__main__ import main
from tests.bench.harness import Report, margin, time_step
from tests.ranks import ROOT, spawn_ranks

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("auto", marks=pytest.mark.gpu)]
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
                    "--tokens=128")  # fmt: skip
    assert results["finished"]
    assert results["environment"]["command"].startswith("python -m tests.bench module --seconds=0")
    rows = {row["kind"]: row for row in results["rows"]}
    assert list(rows) == list(module.KINDS)
    for kind, row in rows.items():
        base = row["implementations"]["nsa_attention" if kind == "parts" else "nsa"]
        for name, result in row["implementations"].items():
            # A missing library is an error.
            assert result["forward"] or "".join(result["errors"].values()), name
            if result["forward_backward"] and result is not base:
                quotient = result["forward_backward"] / base["forward_backward"]
                assert row["ratios"][name]["forward_backward"] == pytest.approx(quotient)
    dense, fla = rows["module"]["implementations"], rows["same-pattern"]["implementations"]["fla"]
    assert {"nsa-local", "index", "index-local", "sdpa-flash"} <= set(dense)
    assert dense["index"]["kernels"][0]["ms"] > 0
    allowed = 1e-5 if device == "cpu" else 0.01  # fp32, bf16
    assert dense["flex-causal"]["difference"]["relative"] < allowed
    assert "group of 16" in fla["errors"]["all"]
    assert rows["parts"]["implementations"]["select_blocks"]["forward_backward"] is None


@pytest.mark.gpu
def test_fla_computes_the_same_as_nsa_with_its_pattern() -> None:
    pytest.importorskip("fla", reason="fla-core is not installed")
    report = Report(Namespace(out=None))
    inputs = module.random_inputs(module.parse_heads("32x2x64"), 1, 2048, peers.FLA_SPEC, report)
    built = module.KINDS["same-pattern"](inputs, report)
    ours, theirs = (built[name]().forward() for name in ("nsa", "fla"))
    assert module.difference(theirs, ours) < 0.02  # bf16, and near-ties selected differently


def test_similar_neighbours_select_mostly_the_same_blocks() -> None:
    spec = NSASpec(select_top=4, local_blocks=1)
    report = Report(Namespace(device="cpu", out=None))
    inputs = module.random_inputs(module.parse_heads("2x1x16"), 1, 1024, spec, report)
    for x, low, high in ((inputs, 0, 0.75), (module.local(inputs, spec), 0.85, 1)):
        index = module.select(x, spec, "blockwise")[1]
        selected = index[:, 1:] >= 0
        same = (index[:, 1:, :, :, None] == index[:, :-1, :, None, :]).any(-1) & selected
        assert low < same.sum() / selected.sum() < high


@pytest.mark.parametrize("device", DEVICES)
def test_train_measures_nsa_an_index_and_dense(bench: Bench, device: str) -> None:
    results = bench("train", f"--device={device}", "--lengths=16", "--tokens=32", "--layers=1",
                    "--vocab=32", "--kinds=nsa,index,dense")  # fmt: skip
    (row,) = results["rows"]
    assert (row["batch"], row["layers"], row["vocab_size"]) == (2, 1, 32)
    for result in row["implementations"].values():
        assert result["errors"] == {}
        assert result["tokens_per_s"] == pytest.approx(32 / result["loop_ms"] * 1e3)
        assert (result["peak_bytes"] is None) == (device == "cpu")
        assert result["steps"] == train.IN_A_ROW
    index, dense = (row["implementations"][kind] for kind in ("index", "dense"))
    over = row["ratios"]["index"]["tokens_per_s"]
    assert over == pytest.approx(index["tokens_per_s"] / dense["tokens_per_s"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_step_learns_the_next_tokens(dtype: torch.dtype) -> None:
    config = ModelConfig(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=32,
                         vocab_size=16)  # fmt: skip
    stepper = train.Stepper(config, CPU, dtype)
    stepper.optimizer.param_groups[0]["lr"] = 1e-2
    ids, labels = train.random_batch(16, 64, 16, CPU)
    assert ids.shape == labels.shape == (4, 16)
    assert torch.equal(labels[:, :-1], ids[:, 1:])
    losses = []
    for _ in range(30):
        stepper.step(ids, labels)
        with torch.no_grad():
            losses.append(stepper.model(ids, labels=labels).item())
    assert losses[-1] < 0.7 * losses[0]


def test_decoding_is_measured_and_the_bytes_it_reads_are_counted(bench: Bench) -> None:
    """Three of four cases; the fourth exceeds --tokens."""
    results = bench("decode", "--device=cpu", "--lengths=100,1100", "--batches=1,2",
                    "--tokens=1200")  # fmt: skip
    rows = results["rows"]
    assert [(row["length"], row["batch"]) for row in rows] == [(100, 1), (1100, 1), (100, 2)]
    for row in rows:
        index = row["implementations"]["index"]
        for name in ("nsa", "dense"):
            result = row["implementations"][name]
            assert result["errors"] == index["errors"] == {}
            over = row["ratios"][name]["attention_ms"]
            assert over == pytest.approx(result["attention_ms"] / index["attention_ms"])
    read = {x: y["read_bytes_per_token"] for x, y in rows[1]["implementations"].items()}
    pair = 12 * 2 * (64 + 64) * 4  # of all layers of M7C, in float32
    blocks, selected = (1100 - 32) // 16 + 1, 15 * 64 + 1100 - 17 * 64  # the last block is partial
    assert read["nsa"] == pair * (blocks + selected + 512)
    assert read["dense"] == pair * 1100
    assert read["index"] == pair * 1100 + pair // 2 * 17  # all; 17 index keys


def test_profiled_times_and_launches_are_per_step_and_overlaps_count_once() -> None:
    """Two steps: "a" twice per step, of which one overlaps "b"; then a gap of 4 ms."""
    spans = [
        profile.Span(name, 1000.0 * (start + shift), 1000.0 * (end + shift))
        for shift in (0, 10)
        for name, start, end in [("a", 0, 2), ("b", 1, 4), ("a", 4, 6)]
    ]
    result = profile.summary(spans, steps=2)
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


@pytest.mark.full
def test_a_production_step_is_profiled_in_both_phases_plain_and_in_deepspeeds_engine(
    tmp_path: Path,
) -> None:
    """In a process of its own, which joins a process group."""
    out = tmp_path / "profile.json"
    sizes = ("layers=1", "width=32", "heads=2", "kv_heads=1", "head_dim=16", "mlp_width=32")
    settings = ["data.seq_len=64", *(f"model.{size}" for size in (*sizes, "vocab_size=64"))]
    command = ["profile", "--device=cpu", "--tokens=64", f"--out={out}"]
    command += [f"--set={setting}" for setting in settings]
    (rank,) = spawn_ranks(ROOT / "tests/bench/__main__.py", *command, ranks=0).started
    assert rank.wait(120) == 0, rank.text("err")
    result = json.loads(out.read_text())
    assert result["skipped"] == []
    cases = {(row["engine"], row["phase"]): row for row in result["rows"]}
    assert len(cases) == 4
    for (engine, phase), row in cases.items():
        assert row["batch"] == 1
        assert 0 < row["busy_fraction"] <= 1
        reduces = any("allreduce" in kernel["name"] for kernel in row["kernels"])
        assert reduces == (engine == "zero1")
        assert (tmp_path / f"profile-{engine}-{phase}.trace.json.gz").stat().st_size > 0
    assert cases["plain", "sparse"]["launches"] > cases["plain", "dense"]["launches"] > 100


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


def test_a_call_is_timed_on_the_host() -> None:
    assert time_step(lambda: time.sleep(0.002), CPU, seconds=0.05) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_a_call_is_timed_on_the_device(graph: bool) -> None:
    device = torch.device("cuda")
    x = torch.zeros(2**28, device=device)  # 1 GB, read and written
    assert 0.1 < time_step(lambda: x.add_(1), device, seconds=0.1, graph=graph) < 100


@pytest.mark.gpu
def test_peak_memory_is_what_an_implementation_holds_and_its_step_allocates() -> None:
    report, device = Report(Namespace(out=None)), torch.device("cuda")
    others = torch.empty(2**24, device=device)

    def measure(_: str, held: torch.Tensor, result: dict[str, Any]) -> None:
        result["peak"] = report.peak_bytes(lambda: torch.empty(2**22, device=device))

    report.compare({}, {"x": lambda: torch.empty(2**20, device=device)}, (), measure, "x")
    assert report.data["rows"][0]["implementations"]["x"]["peak"] == 4 * (2**22 + 2**20)
    del others


def test_failures_end_neither_the_run_nor_the_file_nor_other_implementations(
    tmp_path: Path,
) -> None:
    report = Report(Namespace(device="cpu", out=tmp_path / "figures.json"))

    def fails() -> int:
        raise RuntimeError("out of\nmemory")

    def measure(name: str, built: int, result: dict[str, Any]) -> None:
        result["ms"] = built

    report.attempt("first", lambda: report.add({"case": "first"}))
    now = json.loads((tmp_path / "figures.json").read_text())  # as if the run were killed here
    assert (now["rows"], now["finished"]) == ([{"case": "first"}], False)
    report.attempt("second", fails)
    report.compare({}, {"broken": fails, "fine": lambda: 1}, ("ms",), measure, "fine")
    report.finish()
    now = json.loads((tmp_path / "figures.json").read_text())
    error = "RuntimeError: out of memory"
    assert now["skipped"] == [{"case": "second", "reason": error}]
    assert now["finished"] is False
    broken, fine = {"ms": None, "errors": {"all": error}}, {"ms": 1, "errors": {}}
    ratios = {"broken": {"ms": None}}
    assert now["rows"][1:] == [
        {"implementations": {"broken": broken, "fine": fine}, "ratios": ratios}
    ]


def test_cases_beyond_the_time_limit_are_listed(bench: Bench) -> None:
    results = bench("train", "--device=cpu", "--lengths=64,1k", "--limit=0")
    assert (results["rows"], results["finished"]) == ([], False)
    assert [case["case"] for case in results["skipped"]] == ["T=64", "T=1024"]
    assert "--limit 0 s over" in results["skipped"][0]["reason"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nothing"], "choose from"),
        (["module", "--shapes", "12x5x64"], "12x5x64: not the heads of a model"),
        (["train", "--lengths", "8m"], "8k for 8,192"),
        (["module", "--kinds", "parts,modules"], "'modules': choose from module, peers, same-"),
        (["aot", "--arch", "sm_85"], "--arch: 'sm_85': choose from sm_80, sm_86, sm_89, sm_90"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_confidence_interval_is_that_of_a_textbook() -> None:
    """Gosset's: additional hours of sleep with one drug over the other, ten patients (1908)."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert margin(hours) == pytest.approx(0.8799, abs=1e-4)
    assert margin([1.2]) == 0


def test_traffic_saves_both_models_and_their_totals(tmp_path: Path) -> None:
    out = tmp_path / "traffic.json"
    main(["traffic", "--micro-batch=1", "--seq-len=64", f"--out={out}"])
    result = json.loads(out.read_text())
    for kind in ("nsa", "dense"):
        *parts, total = result[kind]
        assert total["part"] == "total"
        for what in ("operations", "bytes", "launches", "launch_bytes"):
            assert total[what] == sum(row[what] for row in parts) > 0
    assert "seconds" not in total
