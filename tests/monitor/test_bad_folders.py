"""Links and files in the way of what a run writes: they cost a warning, not the run or a file."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa.monitor.environment import write_dtypes
from nsa.monitor.heartbeat import Heartbeat, dump_stacks_on_signal
from nsa.monitor.memory import MemorySnapshots
from nsa.monitor.throughput import StepProfiler


def take_snapshot(run_dir: Path) -> None:
    memory = MemorySnapshots(run_dir, rank=0, every=1)
    memory.take(1, "before")
    memory.close()


def trace_a_step(run_dir: Path) -> None:
    profiler = StepProfiler(run_dir, 0, (1, 1))
    profiler.step_start(1)
    profiler.step_end(1)


def report_dtypes(run_dir: Path) -> None:
    model = torch.nn.Linear(1, 1)
    write_dtypes(run_dir / "dtypes/a.txt", model, torch.optim.AdamW(model.parameters()))


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "heartbeat_rank0.jsonl": (
        lambda run: Heartbeat(run, rank=0, backend="", seconds=100).close("finished"),
        "a write failed, the run continues",
    ),
    "stacks/rank0.txt": (
        lambda run: dump_stacks_on_signal(run, 0),
        "SIGUSR1 will write no stacks",
    ),
    "memory/rank0.jsonl": (take_snapshot, "memory: a write failed, the run continues"),
    "profile/rank0_steps1-1.json.gz": (trace_a_step, "was not written, the run continues"),
    "dtypes/a.txt": (report_dtypes, "a.txt was not written, the run continues"),
}


@pytest.mark.parametrize("name", list(WRITERS)[:3])
def test_no_file_is_appended_to_through_a_symbolic_link(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (target := tmp_path / "target").write_text("precious\n")
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    write, warning = WRITERS[name]
    write(tmp_path / "run")
    err = capsys.readouterr().err
    assert warning in err
    assert "is a symbolic link" in err
    assert target.read_text() == "precious\n"


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_where_a_folder_should_be_costs_a_warning_and_not_the_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = (tmp_path / "run" / name).parent
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_text("a file")
    write, warning = WRITERS[name]
    write(tmp_path / "run")
    assert capsys.readouterr().err.count(warning) == 1
    assert in_the_way.read_text() == "a file"
