"""The harness: timing and peak memory, results that survive failures, flags refused by name."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.__main__ import main
from tests.bench.harness import (
    Report,
    margin,
    mean_and_range,
    peak_bytes,
    row_json,
    time_step,
    words,
    words_of,
)

CPU = torch.device("cpu")


def report(**changed: Any) -> Report:
    return Report(argparse.Namespace(**{"device": "cpu", "out": None, "seconds": 0, **changed}))


def test_a_call_is_timed_on_the_host_and_its_median_is_between_the_extremes() -> None:
    timing = time_step(lambda: time.sleep(0.002), CPU, seconds=0.05)
    assert 2 <= timing["low"] <= timing["median"] <= timing["high"]
    assert 3 <= timing["rounds"] <= 25
    assert time_step(lambda: None, CPU, seconds=0)["rounds"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_a_call_is_timed_on_the_device(graph: bool) -> None:
    device = torch.device("cuda")
    x = torch.zeros(2**28, device=device)  # 1 GB, read and written
    timing = time_step(lambda: x.add_(1), device, seconds=0.1, graph=graph)
    assert 0.1 < timing["low"] <= timing["median"] <= timing["high"] < 100


@pytest.mark.gpu
def test_peak_memory_is_what_a_step_allocates_plus_what_it_holds() -> None:
    device = torch.device("cuda")
    held = torch.empty(2**20, device=device)
    others = torch.empty(2**24, device=device)
    peak = peak_bytes(lambda: torch.empty(2**22, device=device), [held, held.detach()], device)
    assert peak == 4 * (2**22 + 2**20)
    del others


def test_a_failing_case_ends_neither_the_run_nor_the_file(tmp_path: Path) -> None:
    benchmark = report(out=tmp_path / "figures.json")

    def fails() -> None:
        raise RuntimeError("out of memory")

    benchmark.attempt("first", lambda: benchmark.add({"case": "first"}))
    now = json.loads((tmp_path / "figures.json").read_text())  # as if the run were killed here
    assert (now["rows"], now["finished"]) == ([{"case": "first"}], False)
    benchmark.attempt("second", fails)
    benchmark.attempt("third", lambda: benchmark.add({"case": "third"}))
    benchmark.finish()
    now = json.loads((tmp_path / "figures.json").read_text())
    assert now["skipped"] == [{"case": "second", "reason": "RuntimeError: out of memory"}]
    assert (len(now["rows"]), now["finished"]) == (2, False)


def test_a_failing_implementation_leaves_the_others_their_figures() -> None:
    def fails() -> None:
        raise RuntimeError("no kernel")

    def measure(name: str, built: int, result: dict[str, Any]) -> None:
        result["ms"] = built

    results = report().each({"broken": fails, "fine": lambda: 1}, ("ms",), measure)
    assert results["broken"] == {"ms": None, "errors": {"all": "RuntimeError: no kernel"}}
    assert results["fine"] == {"ms": 1, "errors": {}}


def test_cases_beyond_the_time_limit_are_listed(tmp_path: Path) -> None:
    out = tmp_path / "train.json"
    main(["train", "--device=cpu", "--lengths=64,128", "--limit=0", f"--out={out}"])
    results = json.loads(out.read_text())
    assert (results["rows"], results["finished"]) == ([], False)
    assert [case["case"] for case in results["skipped"]] == ["T=64", "T=128"]
    assert "--limit 0 s over" in results["skipped"][0]["reason"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nothing"], "choose from"),
        (["module", "--shapes", "12x5x64"], "12x5x64: not the heads of a model"),
        (["train", "--lengths", "8m"], "8k for 8,192"),
        (["module", "--kinds", "modules"], "same-pattern"),
        (["aot", "--arch", "sm_85"], "--arch: 'sm_85': choose from sm_80, sm_86, sm_89, sm_90"),
        (["aot", "--operation", "attend"], "'attend': choose from compressed_attention, "),
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
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="--device cuda: PyTorch sees no CUDA device"):
        main(["train", "--device", "cuda"])


def test_lists_are_separated_by_commas_without_duplicates() -> None:
    assert words("b,a,,b") == ["b", "a"]
    assert words_of("a", "b")("b,b,a") == ["b", "a"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"'c': choose from a, b, separated by"):
        words_of("a", "b")("a,c")


def test_json_has_one_line_per_row() -> None:
    result = {"a": 1, "rows": [{"b": [1, 2]}, {"b": None}], "none": []}
    text = row_json(result)
    assert json.loads(text) == result
    assert text.splitlines()[2:5] == [' "rows": [', '  {"b": [1, 2]},', '  {"b": null}']


def test_a_confidence_interval_is_that_of_a_textbook() -> None:
    """Gosset's: additional hours of sleep with one drug over the other, ten patients (1908)."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert margin(hours) == pytest.approx(0.8799, abs=1e-4)
    assert mean_and_range(hours, ".2f") == "1.58 (0.00 to 4.60)"
    assert margin([1.2]) == 0
    assert mean_and_range([1.2, 1.2], ".1f") == "1.2"
    assert mean_and_range([], ".1f") == "–"
