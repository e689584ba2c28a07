from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from nsa.monitor.profile import StepProfiler, parse_steps

STEPS = {1: torch.sin, 2: torch.cos, 3: torch.tan, 4: torch.exp}


def run(profiler: StepProfiler, first: int = 1, last: int = 4) -> None:
    for step in range(first, last + 1):
        profiler.step_start(step)
        STEPS[step](torch.ones(3))
        profiler.step_end(step)
    profiler.close()


def traced(path: Path) -> set[str]:
    """Which of the steps' operations a trace holds."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events} & {f"aten::{op.__name__}" for op in STEPS.values()}


def test_the_chosen_steps_are_traced_and_no_others(tmp_path: Path) -> None:
    run(StepProfiler(tmp_path, rank=1, steps=(2, 3)))
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank1_steps2-3.json.gz"
    assert traced(path) == {"aten::cos", "aten::tan"}


def test_a_run_that_begins_and_ends_within_the_chosen_steps_traces_what_it_took(
    tmp_path: Path,
) -> None:
    run(StepProfiler(tmp_path, rank=0, steps=(1, 50)), first=3)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank0_steps3-4.json.gz"
    assert traced(path) == {"aten::tan", "aten::exp"}


@pytest.mark.parametrize("steps", [None, (9, 9)])
def test_where_no_step_is_chosen_nothing_is_made(
    tmp_path: Path, steps: tuple[int, int] | None
) -> None:
    run(StepProfiler(tmp_path, rank=0, steps=steps))
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_costs_the_trace_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    run(StepProfiler(tmp_path, rank=0, steps=(1, 1)))
    assert "was not written, the run goes on" in capsys.readouterr().err


def test_steps_are_read_from_the_flag() -> None:
    assert parse_steps("10-12") == (10, 12)
    assert parse_steps(" 7 ") == (7, 7)


@pytest.mark.parametrize("text", ["", "12-10", "0-3", "a-b", "1,2", "-5", "3-"])
def test_steps_that_make_no_sense_are_refused_by_the_flag_s_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"--profile-steps .*such as 10-12"):
        parse_steps(text)
