"""Tuning stores the fastest candidate under the key that a launch looks up."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa.ops.inputs import AttentionInputs
from nsa.ops.triton import configs
from nsa.ops.triton.configs import (
    Config,
    candidates,
    choose_config,
    override_choices,
    save_tuned,
)
from nsa.ops.tune import (
    Heads,
    Step,
    calls,
    discover,
    fastest,
    key_of,
    parse_heads,
    tune_device,
)
from nsa.spec import NSASpec

pytestmark = pytest.mark.usefixtures("own_cache")
HALF = torch.float16
LIKE = torch.empty(0, dtype=HALF)


def milliseconds(step: Step) -> float:
    """Median wall time of three calls after a first one: there is no GPU here."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


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
    best, times = fastest("toy_forward", operations["toy_forward"], milliseconds)
    assert best == last
    assert list(times) == [str(option) for option in candidates("toy_forward", (64, 64), HALF)]
    save_tuned({key_of("toy_forward", (64, 64), HALF, 2048): last})
    assert choose_config("toy_forward", (64, 64), LIKE, 2048) == last


def test_only_the_kernel_in_question_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its candidates are compared without the noise and the time of the other kernels."""
    from nsa.ops.triton import launch
    from nsa.ops.triton.band import band_backward, band_forward

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
    best, _ = fastest("window_queries", operations["window_queries"], milliseconds)
    assert best in rest
    assert runs["band_forward_kernel"] == runs["band_keys_kernel"] == 1 + len(rest)
    assert runs["band_queries_kernel"] >= 4 * (1 + len(rest))


def test_the_library_with_the_fastest_kernel_is_stored_by_name() -> None:
    def run() -> None:
        by = configs.choose("toy_branch", ["ours", "another's"], (64, 64), HALF, 2048)
        time.sleep(0.02 if by == "ours" else 0)

    best, _ = fastest("toy_branch", discover({"one": run})["toy_branch"], milliseconds)
    assert best == "another's"
    save_tuned({key_of("toy_branch", (64, 64), HALF, 2048): best})
    assert configs.choose("toy_branch", ["ours", "another's"], (64, 64), HALF, 2048) == "another's"
    assert configs.choose("toy_branch", ["ours"], (64, 64), HALF, 2048) == "ours"


@pytest.mark.parametrize("failing", ["first", "all"])
def test_a_candidate_that_cannot_be_launched_is_listed_and_not_stored(failing: str) -> None:
    first, *_ = options = candidates("toy_keys", (64, 64), HALF)
    fails = options if failing == "all" else [first]

    def run() -> None:
        if choose_config("toy_keys", (64, 64), LIKE, 2048) in fails and tuning:
            raise RuntimeError("out of resource: shared memory")

    tuning: list[bool] = []
    operations = discover({"one": run})
    tuning.append(True)
    best, times = fastest("toy_keys", operations["toy_keys"], milliseconds)
    assert times[str(first)] == float("inf")
    assert (best is None) == (failing == "all")
    assert best != first


def test_the_real_launchers_look_up_the_keys_that_tuning_writes() -> None:
    kernel_launches = pytest.importorskip("tests.compile.launches")
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


def test_the_calls_of_tuning_launch_every_operation_with_tiles() -> None:
    """Run by the interpreter, in PyTorch's smallest sizes."""
    tuned = discover(calls(Heads(2, 1, 16, 16), 64, 64, torch.device("cpu")))
    attention = ("gated_forward", "gated_queries", "gated_keys")
    window = ("window_forward", "window_queries", "window_keys")
    compressed = ("compressed_forward", "compressed_queries", "compressed_keys")
    selected = ("selected_forward", "selected_queries", "selected_keys", "select")
    assert set(tuned) >= {*attention, *window, *compressed, *selected, "gathered_decode"}
    (decode,) = tuned["gathered_decode"].steps
    assert decode == "decode 2x1x16x16 64"


def test_heads_are_parsed_and_others_refused() -> None:
    assert parse_heads("12x2x64") == Heads(12, 2, 64, 64)
    assert parse_heads("64x4x192x128") == Heads(64, 4, 192, 128)
    for text in ("12x5x64", "12x2", "m7c", "0x1x64"):
        with pytest.raises(ValueError, match=f"--tune {text}: not the heads of a model; write"):
            parse_heads(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_without_a_gpu_tuning_is_refused() -> None:
    with pytest.raises(ValueError, match="--tune: PyTorch sees no GPU"):
        list(tune_device([Heads(12, 2, 64, 64)]))


@pytest.mark.gpu
def test_the_gpu_is_tuned_for_the_heads_of_a_model() -> None:
    lines = list(tune_device([parse_heads("4x2x64")]))
    assert any(line.startswith("gated_forward 64x64 bfloat16 short: ") for line in lines)
    assert configs.tuned_path().exists()
