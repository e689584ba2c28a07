"""What is a stall or a sickness, judged from what a run has written down."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from nsa.watchdog.hang_detector import Judge, Rank
from tests.monitor.heartbeats import a_line, write_limits


def test_a_rank_is_not_judged_silent_while_the_disk_takes_no_lines(tmp_path: Path) -> None:
    said: list[str] = []
    write_limits(tmp_path / "run")
    line = a_line(0, mono=time.monotonic() - 100)
    rank = Rank(0, line, 0.0, psutil.Process())
    judge = Judge(tmp_path / "run", said.append)
    verdict = judge.stall({0: rank}, time.monotonic())
    assert verdict is not None
    assert "has written nothing in forward after step 7 for 100 s" in verdict.reason
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert judge.stall({0: rank}, time.monotonic()) is None
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    assert judge.stall({0: rank}, time.monotonic()) is None, "it has had no time to write since"
    assert said == [f"{tmp_path / 'run'} cannot be written, so that heartbeats prove nothing"]


def test_a_rank_that_may_hold_up_the_one_at_its_limit_is_named(tmp_path: Path) -> None:
    write_limits(tmp_path, compute=10, data=1_000)
    ranks = {
        number: Rank(number, a_line(number, phase=phase, since=since), 0.0, psutil.Process())
        for number, phase, since in ((0, "forward", 11.0), (1, "data", 60.0))
    }
    verdict = Judge(tmp_path, print).stall(ranks, time.monotonic())
    assert verdict is not None
    assert verdict.rank == 0
    assert "rank 1 has been in data for longer still, 60 s" in verdict.reason


def test_a_collapse_of_throughput_is_told_once_an_episode(tmp_path: Path) -> None:
    speeds = [1000.0] * 30
    judge = Judge(tmp_path, print)
    judge.stall({}, 0.0)
    told = []
    for speed in [*[100.0] * 12, *[1000.0] * 5, *[100.0] * 12]:
        speeds.append(speed)
        rows = [f"{10 * number},{speed}\n" for number, speed in enumerate(speeds, 1)]
        (tmp_path / "metrics.csv").write_text("step,tokens_per_s\n" + "".join(rows))
        told += [(len(speeds), *found) for found in judge.sicknesses()]
    assert [(rows, action) for rows, _, action in told] == [(40, "warn"), (57, "warn")]
    assert "at most 100 tokens/s in the last 10 logged steps, up to step 400" in told[0][1].reason


def test_a_dead_gate_is_one_whose_mean_over_layers_stays_down(tmp_path: Path) -> None:
    write_limits(tmp_path, on_dead_gate="halt")
    judge = Judge(tmp_path, print)
    judge.stall({}, 0.0)
    for low, found in ((9, []), (10, ["halt"])):
        rows = [
            f"{step},{layer},0.5,{0.5 if layer and step <= 12 - low else 0.0001},0.0,0.5\n"
            for step in range(1, 13)
            for layer in range(2)
        ]
        header = "step,layer,gate_cmp,gate_sel,gate_sel_std,gate_win\n"
        (tmp_path / "selection.csv").write_text(header + "".join(rows))
        verdicts = judge.sicknesses()
        assert [action for _, action in verdicts] == found
    assert "the gate of branch sel is dead" in verdicts[0][0].reason
