"""Tuning keeps what was fastest, under the key that a launch looks up."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.bench.__main__ import main
from nsa.bench.report import Report
from nsa.bench.tune import _row, _show, discover, key_of, tune
from nsa.ops.triton import configs
from nsa.ops.triton.configs import Config, candidates, choose_config, choosing, keep_tuned

HALF = torch.float16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices kept here are not those that anybody runs with, before or after."""
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configs._tuned.cache_clear()
    yield
    configs._tuned.cache_clear()


def report() -> Report:
    flags = {"device": "cpu", "dtype": "fp16", "limit": None, "out": None, "arguments": []}
    return Report(argparse.Namespace(**flags, seconds=0.001, rounds=3))


def operation(name: str, slow: Callable[[Config], bool]) -> Callable[[], None]:
    """One whose time is decided by the tile sizes it is given."""

    def run() -> None:
        time.sleep(0.02 if slow(choose_config(name, (64, 64), HALF)) else 0)

    return run


def test_the_fastest_candidate_is_kept_and_taken_by_the_next_launch() -> None:
    first, *_, last = candidates("toy_forward", (64, 64), HALF)
    steps = {
        "one": operation("toy_forward", lambda config: config != last),
        "two": operation("toy_queries", lambda config: False),
        "three": operation("toy_forward", lambda config: config == first),
    }
    found = discover(steps)
    assert {name: list(asked.steps) for name, asked in found.items()} == {
        "toy_forward": ["one", "three"],
        "toy_queries": ["two"],
    }
    results = {name: (times, best) for name, _, times, best in tune(found, report())}
    assert results["toy_forward"][1] == last
    assert [one["config"]["rows"] for one in results["toy_forward"][0]] == [
        option.rows for option in candidates("toy_forward", (64, 64), HALF)
    ]
    assert choose_config("toy_forward", (64, 64), HALF) == first
    keep_tuned({key_of("toy_forward", (64, 64), HALF): last})
    assert choose_config("toy_forward", (64, 64), HALF) == last
    assert (
        choose_config("toy_forward", (64, 128), HALF)
        == candidates("toy_forward", (64, 128), HALF)[0]
    )


def test_whose_kernel_is_the_fastest_is_kept_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        by = configs.choose("toy_branch", ["ours", "another's"], (64, 64), HALF)
        time.sleep(0.02 if by == "ours" else 0)

    ((_, asked, times, best),) = tune(discover({"one": run}), report())
    assert best == "another's"
    key = key_of("toy_branch", (64, 64), HALF)
    _show([_row(key, asked, times, best)])
    assert re.search(r"another's .* kept", capsys.readouterr().out)
    keep_tuned({key: best})
    assert configs.choose("toy_branch", ["ours", "another's"], (64, 64), HALF) == "another's"
    assert configs.choose("toy_branch", ["ours"], (64, 64), HALF) == "ours"


def test_a_candidate_that_cannot_be_launched_is_listed_and_not_kept() -> None:
    first, *_ = candidates("toy_keys", (64, 64), HALF)

    def run() -> None:
        if choose_config("toy_keys", (64, 64), HALF) == first and tuning:
            raise RuntimeError("out of resource: shared memory")

    tuning: list[bool] = []
    found = discover({"one": run})
    tuning.append(True)
    ((_, _, times, best),) = tune(found, report())
    assert best is not None
    assert best != first
    assert "shared memory" in times[0]["why_not"]
    assert times[0]["ms"] is None


def test_the_real_launchers_look_up_the_keys_that_tuning_writes() -> None:
    aot = pytest.importorskip("nsa.bench.aot")
    from nsa.ops.triton.launch import recording

    def launches(call: Callable[[Any], None], case: Any) -> list[Config]:
        with recording() as started:
            call(case)
        return [launch.config for launch in started]

    for name, call in aot.OPERATIONS.items():
        case = aot.Case(name, 12, 2, 64, 96, 16_384, "bf16", False)
        asked: dict[str, list[Config]] = {}

        def note(operation: str, options: list[Config], asked: Any = asked) -> Config:
            return asked.setdefault(operation, options)[-1]

        with choosing(note):
            wanted = launches(call, case)
        assert asked, name
        before = launches(call, case)
        keep_tuned(
            {
                key_of(operation, (64, 128), torch.bfloat16): options[-1]
                for operation, options in asked.items()
            }
        )
        assert launches(call, case) == wanted, name
        if any(len(options) > 1 for options in asked.values()):
            assert wanted != before, name
        keep_tuned(
            {
                key_of(operation, (64, 128), torch.bfloat16): options[0]
                for operation, options in asked.items()
            }
        )


def test_a_backend_without_choices_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tune.json"
    main(["tune", "--device", "cpu", "--shapes", "2x1x16", "--lengths", "64", "--tokens", "64",
          "--out", str(out)])  # fmt: skip
    assert "backend blockwise: none of its operations" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert (found["rows"], found["kept_in"], found["finished"]) == ([], None, True)
