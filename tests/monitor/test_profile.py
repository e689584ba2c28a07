from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from nsa.monitor.throughput import StepProfiler, parse_steps

STEPS = {1: torch.sin, 2: torch.cos, 3: torch.tan, 4: torch.exp}


def run(profiler: StepProfiler, first: int = 1, last: int = 4) -> None:
    for step in range(first, last + 1):
        profiler.step_start(step)
        STEPS[step](torch.ones(3))
        profiler.step_end(step)
    profiler.close()


def traced(path: Path) -> set[str]:
    """Return the steps' operations in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events} & {f"aten::{op.__name__}" for op in STEPS.values()}


def test_only_the_given_steps_are_traced(tmp_path: Path) -> None:
    run(StepProfiler(tmp_path, rank=1, steps=(2, 3)))
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank1_steps2-3.json.gz"
    assert traced(path) == {"aten::cos", "aten::tan"}


def test_a_run_within_the_given_steps_traces_all_of_its_steps(tmp_path: Path) -> None:
    run(StepProfiler(tmp_path, rank=0, steps=(1, 50)), first=3)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank0_steps3-4.json.gz"
    assert traced(path) == {"aten::tan", "aten::exp"}


@pytest.mark.parametrize("steps", [None, (9, 9)])
def test_without_a_step_to_trace_nothing_is_written(
    tmp_path: Path, steps: tuple[int, int] | None
) -> None:
    run(StepProfiler(tmp_path, rank=0, steps=steps))
    assert not list(tmp_path.iterdir())


def test_the_flag_takes_one_step_or_a_range() -> None:
    assert parse_steps("10-12") == (10, 12)
    assert parse_steps(" 7 ") == (7, 7)


@pytest.mark.parametrize("text", ["", "12-10", "0-3", "a-b", "1,2", "-5", "3-"])
def test_invalid_ranges_are_refused_with_the_flags_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"--profile-steps .*counted from 1: 10-12"):
        parse_steps(text)
