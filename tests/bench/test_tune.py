"""Tuning stores the fastest candidate under the key that a launch looks up."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.bench.__main__ import main
from nsa.bench.results import Report
from nsa.bench.tune import discover, key_of, print_rows, tune
from nsa.ops.inputs import AttentionInputs
from nsa.ops.triton import configs
from nsa.ops.triton.configs import (
    Config,
    candidates,
    choose_config,
    forget_tuned,
    override_choices,
    save_tuned,
)
from nsa.spec import NSASpec

HALF = torch.float16
LIKE = torch.empty(0, dtype=HALF)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices stored by these tests are invisible to everything else."""
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_tuned()
    yield
    forget_tuned()


def report() -> Report:
    flags = {"device": "cpu", "dtype": "fp16", "out": None}
    return Report(argparse.Namespace(**flags, seconds=0.001, rounds=3))


def operation(name: str, slow: Callable[[Config], bool]) -> Callable[[], None]:
    """An operation whose time depends on its tile sizes."""

    def run() -> None:
        time.sleep(0.02 if slow(choose_config(name, (64, 64), LIKE, 2048)) else 0)

    return run


def test_the_fastest_candidate_is_stored_and_used_by_the_next_launch() -> None:
    first, *_, last = candidates("toy_forward", (64, 64), HALF)
    steps = {
        "one": operation("toy_forward", lambda config: config != last),
        "two": operation("toy_queries", lambda config: False),
        "three": operation("toy_forward", lambda config: config == first),
    }
    operations = discover(steps)
    assert {name: list(x.steps) for name, x in operations.items()} == {
        "toy_forward": ["one", "three"],
        "toy_queries": ["two"],
    }
    rows, best = tune(operations, report())
    assert best["toy_forward"] == last
    assert [candidate["config"]["rows"] for candidate in rows[0]["candidates"]] == [
        option.rows for option in candidates("toy_forward", (64, 64), HALF)
    ]
    assert choose_config("toy_forward", (64, 64), LIKE, 2048) == first
    save_tuned({key_of("toy_forward", (64, 64), HALF, 2048): last})
    assert choose_config("toy_forward", (64, 64), LIKE, 2048) == last
    assert (
        choose_config("toy_forward", (64, 128), LIKE, 2048)
        == candidates("toy_forward", (64, 128), HALF)[0]
    )


def test_only_the_kernel_in_question_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its candidates are compared without the noise and the time of the other kernels."""
    from nsa.ops.triton import launch
    from nsa.ops.triton.band_op import band_backward, band_forward

    runs: Counter[str] = Counter()

    def run(kernel: Any, grid: Any, values: Any, runtime: int, config: Config) -> None:
        runs[kernel.fn.__name__] += 1
        slow = kernel.fn.__name__ == "band_queries_kernel" and config == first
        time.sleep(0.02 if slow else 0)

    def call() -> None:
        rest = None, None, "window", NSASpec(window=16), 0.125
        x = AttentionInputs(*[torch.ones(1, 64, 2, 64, dtype=HALF)] * 3, *rest)
        o, lse = band_forward(x)
        band_backward(o, lse, x, o, lse)

    monkeypatch.setattr(launch, "_run", run)
    first, *rest = candidates("window_queries", (64, 64), HALF)
    operations = discover({"call": call})
    assert operations.keys() == {"window_forward", "window_queries", "window_keys"}
    runs.clear()
    _, best = tune({"window_queries": operations["window_queries"]}, report())
    assert best["window_queries"] in rest
    assert runs["band_forward_kernel"] == runs["band_keys_kernel"] == 1 + len(rest)
    assert runs["band_queries_kernel"] >= 4 * (1 + len(rest))


def test_the_library_with_the_fastest_kernel_is_stored_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run() -> None:
        by = configs.choose("toy_branch", ["ours", "another's"], (64, 64), HALF, 2048)
        time.sleep(0.02 if by == "ours" else 0)

    (row,), best = tune(discover({"one": run}), report())
    assert best == {"toy_branch": "another's"}
    key = key_of("toy_branch", (64, 64), HALF, 2048)
    print_rows([{"key": key, **row}])
    assert re.search(r"another's .* kept", capsys.readouterr().out)
    save_tuned({key: best["toy_branch"]})
    assert configs.choose("toy_branch", ["ours", "another's"], (64, 64), HALF, 2048) == "another's"
    assert configs.choose("toy_branch", ["ours"], (64, 64), HALF, 2048) == "ours"


def test_a_candidate_that_cannot_be_launched_is_listed_and_not_stored() -> None:
    first, *_ = candidates("toy_keys", (64, 64), HALF)

    def run() -> None:
        if choose_config("toy_keys", (64, 64), LIKE, 2048) == first and tuning:
            raise RuntimeError("out of resource: shared memory")

    tuning: list[bool] = []
    operations = discover({"one": run})
    tuning.append(True)
    (row,), best = tune(operations, report())
    assert best["toy_keys"] != first
    assert "shared memory" in row["candidates"][0]["errors"]["ms"]
    assert row["candidates"][0]["ms"] is None


def test_the_real_launchers_look_up_the_keys_that_tuning_writes() -> None:
    kernel_launches = pytest.importorskip("nsa.bench.kernel_launches")
    from nsa.ops.triton.launch import recording

    def launches(call: Callable[[Any], None], case: Any) -> list[Config]:
        with recording() as recorded:
            call(case)
        return [launch.config for launch in recorded]

    tuned = set()
    for name, call in kernel_launches.OPERATIONS.items():
        case = kernel_launches.Case(name, 12, 2, 64, 96, 16_384, "bf16", False)
        options_of: dict[str, list[Config]] = {}

        def note(operation: str, options: list[Config], seen: Any = options_of) -> Config:
            return seen.setdefault(operation, options)[-1]

        with override_choices(note):
            wanted = launches(call, case)
        if not options_of:  # elementwise kernels have fixed tiles
            continue
        tuned.add(name)
        before = launches(call, case)
        save_tuned(
            {
                key_of(operation, (64, 128), torch.bfloat16, 16_384): options[-1]
                for operation, options in options_of.items()
            }
        )
        assert launches(call, case) == wanted, name
        if any(len(options) > 1 for options in options_of.values()):
            assert wanted != before, name
        save_tuned(
            {
                key_of(operation, (64, 128), torch.bfloat16, 16_384): options[0]
                for operation, options in options_of.items()
            }
        )
    assert tuned >= {name for name in kernel_launches.OPERATIONS if "attention" in name}


def test_a_backend_without_candidates_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tune.json"
    main(["tune", "--device", "cpu", "--shapes", "2x1x16", "--lengths", "64", "--tokens", "64",
          "--out", str(out)])  # fmt: skip
    assert "backend blockwise: none of its operations" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert (results["rows"], results["kept_in"], results["finished"]) == ([], None, True)
