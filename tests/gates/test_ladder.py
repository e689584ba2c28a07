from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nsa.gates.criteria import Criterion
from nsa.gates.ladder import (
    Gate,
    Verdict,
    judge,
    ladder,
    preflight,
    read_gates,
    record,
    until,
)
from nsa.monitor.artifacts import read_rank, read_table
from nsa.monitor.config import LadderConfig
from nsa.monitor.heartbeat import Heartbeat
from tests.monitor.written import beats, write_beats, write_metrics, write_run, write_selection

CONFIG = LadderConfig(min_gate=0.0)
SMOKE = Gate("smoke", 300)


def answer(run_dir: Path, name: str, gate: Gate = SMOKE, **changes: Any) -> Criterion:
    verdict = judge(run_dir, gate, replace(CONFIG, **changes), patience=0)
    (found,) = [criterion for criterion in verdict.criteria if name in criterion.name]
    assert verdict.go == all(criterion.ok is not False for criterion in verdict.criteria)
    return found


def test_a_run_passes_the_gates_below_its_end_and_then_production() -> None:
    names = [(gate.name, gate.step) for gate in ladder(LadderConfig(), 50_000)]
    assert names == [("sanity", 1), ("smoke", 300), ("extended", 1_000), ("production", 50_000)]
    assert ladder(LadderConfig(), 300) == [Gate("sanity", 1), Gate("production", 300)]
    assert ladder(LadderConfig(), 1) == [Gate("production", 1)]


@pytest.mark.parametrize(
    ("text", "step"),
    [("250", 250), ("99999", 50_000), ("smoke", 300), ("Extended", 1_000), ("preflight", 0)],
)
def test_until_takes_steps_and_gates(text: str, step: int) -> None:
    assert until(text, LadderConfig(), 50_000) == step


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("smok", r"--until smok: .* did you mean smoke\? \(choose from preflight, sanity"),
        ("xyzzy", "--until xyzzy: not a number of steps, and no gate"),
        ("0", "--until 0: must be 1 or more"),
        ("extended", "stands at step 1,000, and this run ends at 300; give it more --steps"),
    ],
)
def test_until_says_what_could_have_been_meant(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        until(text, LadderConfig(), 300)


def test_a_healthy_run_is_a_go_and_its_evidence_names_the_files(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path), SMOKE, LadderConfig(), patience=0)
    assert verdict.go
    assert [criterion.name for criterion in verdict.unmeasured] == ["lowest mean gate of a branch"]
    assert all(criterion.evidence for criterion in verdict.criteria)
    steps = verdict.criteria[0]
    assert (steps.name, steps.value) == ("steps recorded", 300)
    assert "metrics.csv (rows: 31)" in steps.evidence
    assert "Go (10 of 11 criteria met, 1 not measured)" in verdict.summary


def test_twenty_steps_never_pass_for_three_hundred(tmp_path: Path) -> None:
    """F11: the earlier system's reports said "500+ steps" after 10 and 20."""
    verdict = judge(write_run(tmp_path, steps=20), SMOKE, CONFIG, patience=0)
    assert not verdict.go
    assert "nothing is recorded of steps 21-300" in verdict.summary
    assert {criterion.name for criterion in verdict.failed} >= {
        "steps recorded",
        "slowest rank's step",
    }


def test_steps_between_two_processes_that_nobody_recorded_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        lost = beats(300, rank=rank, start=150, pid=900)
        write_beats(tmp_path, beats(100, rank=rank), lost)
    write_metrics(tmp_path, 100)
    write_metrics(tmp_path, 300, start=150)
    found = answer(tmp_path, "steps recorded")
    assert found.ok is False
    assert found.value == 250
    assert "steps 101-150" in found.evidence


def test_rows_that_a_full_disk_cost_are_made_up_for_by_heartbeats(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10] + lines[20:]))
    assert answer(tmp_path, "steps recorded").ok


def test_a_rank_that_stayed_behind_is_named(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_beats(tmp_path, beats(300), beats(299, rank=1))
    found = answer(tmp_path, "slowest rank")
    assert found.ok is False
    assert "rank 1 is the slowest" in found.evidence
    (tmp_path / "env.json").write_text('{"world_size": 1}')  # went on with one rank
    assert answer(tmp_path, "slowest rank").ok
    (tmp_path / "env.json").write_text('{"world_size": 3}')  # the third never said a word
    assert answer(tmp_path, "slowest rank").value == 0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_one_loss_that_is_not_finite_is_a_no_go(tmp_path: Path, loss: float) -> None:
    write_run(tmp_path)
    write_metrics(tmp_path, change=lambda step: {"loss": loss} if step == 200 else {})
    found = answer(tmp_path, "not finite")
    assert (found.ok, found.value) == (False, 1)
    assert "step 200" in found.evidence
    assert answer(tmp_path, "not finite", Gate("sanity", 1)).ok, "what comes later isn't judged"


def test_a_loss_that_does_not_fall_is_a_no_go_from_the_second_gate_on(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_metrics(tmp_path, change=lambda step: {"loss": 3 + step / 1e4})
    assert answer(tmp_path, "loss at the end").ok is False
    assert answer(tmp_path, "loss at the end", require_fall=False).ok is None
    assert judge(tmp_path, Gate("sanity", 1), CONFIG, patience=0).go


def test_a_stall_within_a_process_is_a_pause_but_saving_is_not(tmp_path: Path) -> None:
    for name, phase in (("hung", "forward"), ("saving", "save"), ("evaluating", "eval")):
        write_metrics(tmp_path / name)
        write_beats(
            tmp_path / name,
            beats(300),
            beats(300, rank=1, waits={200: (phase, 130.0)}),
        )
    found = answer(tmp_path / "hung", "longest pause")
    assert found.ok is False
    assert found.value == pytest.approx(130.5, abs=0.1)
    assert "rank 1, before step 201" in found.evidence
    assert answer(tmp_path / "saving", "longest pause").value == pytest.approx(0.5, abs=0.1)
    assert answer(tmp_path / "evaluating", "longest pause").ok


def test_a_long_save_is_no_pause_even_if_hardly_a_line_tells_of_it(tmp_path: Path) -> None:
    lines = beats(300, waits={200: ("save", 130.0)})
    saving = [line for line in lines if line["phase"] == "save"]
    write_beats(tmp_path, [line for line in lines if line not in saving[1:]])
    write_metrics(tmp_path)
    assert answer(tmp_path, "longest pause").value == pytest.approx(0.5, abs=0.1)


def test_what_came_after_a_gate_does_not_change_its_verdict(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=400, waits={300: ("idle", 500.0), 350: ("forward", 500.0)})
    assert judge(run_dir, SMOKE, CONFIG, patience=0).go
    assert not judge(run_dir, Gate("production", 400), CONFIG, patience=0).go


def test_a_hang_that_ended_in_a_kill_is_a_pause_but_the_time_to_the_resume_is_not(
    tmp_path: Path,
) -> None:
    write_metrics(tmp_path)
    first, second = beats(100), beats(300, start=90, pid=900, mono=100_000.0)
    write_beats(tmp_path / "killed", first, second)
    write_metrics(tmp_path / "killed")
    assert answer(tmp_path / "killed", "longest pause").value == pytest.approx(0.5, abs=0.1)
    hung = beats(100, waits={100: ("backward", 500.0)})
    write_beats(tmp_path / "hung", hung, second)
    write_metrics(tmp_path / "hung")
    assert answer(tmp_path / "hung", "longest pause").value == pytest.approx(500, abs=1)


def test_without_heartbeats_rows_bound_the_pauses(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    assert answer(tmp_path, "longest pause", max_pause=6.0).ok
    assert answer(tmp_path, "longest pause", max_pause=5.0).ok is None, "ten steps of 0.5 s"
    assert answer(tmp_path, "longest pause", max_pause=0.4).ok is False
    assert answer(tmp_path, "slowest rank").ok is None


def test_unsteady_steps_are_a_no_go_and_few_ones_are_not_judged(tmp_path: Path) -> None:
    write_metrics(tmp_path, change=lambda step: {"seconds": 1.5} if step % 50 == 0 else {})
    assert answer(tmp_path, "slow step").ok is False
    assert answer(tmp_path, "slow step", max_step_spread=4.0).ok
    assert answer(tmp_path, "slow step", max_step_spread=0.0).ok is None
    few = answer(tmp_path, "slow step", Gate("smoke", 150))
    assert few.ok is None
    assert "15 logged steps were timed after the warm-up, 20 are needed" in few.evidence


def test_speed_is_judged_from_the_gate_before(tmp_path: Path) -> None:
    slow = {"tokens_per_s": 30.0}
    write_metrics(tmp_path, 400, change=lambda step: slow if 1 < step <= 300 else {})
    assert answer(tmp_path, "tokens/s").value == 30.0
    assert answer(tmp_path, "tokens/s").ok is False
    assert answer(tmp_path, "tokens/s", Gate("extended", 400)).ok


def test_the_first_step_of_each_process_does_not_count_as_slow(tmp_path: Path) -> None:
    first = {"tokens_per_s": None, "seconds": 400.0}
    write_metrics(tmp_path, change=lambda step: first if step == 150 else {})
    assert answer(tmp_path, "longest pause").ok


def test_idle_or_unequal_gpus_are_a_no_go(tmp_path: Path) -> None:
    for name, (first, second) in {"idle": (0.5, 0.5), "uneven": (0.99, 0.75)}.items():
        write_metrics(tmp_path / name)
        write_beats(tmp_path / name, beats(300, gpu_busy=first))
        write_beats(tmp_path / name, beats(300, rank=1, gpu_busy=second))
    assert answer(tmp_path / "idle", "idlest GPU").ok is False
    assert answer(tmp_path / "idle", "busiest and idlest").ok
    assert answer(tmp_path / "uneven", "idlest GPU", min_gpu_busy=0.7).ok
    assert answer(tmp_path / "uneven", "idlest GPU").ok is False
    assert answer(tmp_path / "uneven", "busiest and idlest").ok is False
    write_beats(tmp_path / "blind", beats(300), beats(300, rank=1, gpu_busy=None))
    assert answer(tmp_path / "blind", "idlest GPU").ok is None


def test_a_loss_of_a_step_that_was_left_out_is_no_no_go_and_one_more_is(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, skipped=1)
    write_metrics(run_dir, change=lambda step: {"loss": math.nan} if step == 150 else {})
    assert answer(run_dir, "not finite").ok
    write_metrics(run_dir, change=lambda step: {"loss": math.inf} if step in (150, 200) else {})
    assert answer(run_dir, "not finite").ok is False


def test_in_a_few_steps_memory_has_no_growth_to_judge(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=60)
    assert answer(run_dir, "growth", Gate("production", 60)).ok is None


def test_too_many_skipped_steps_are_a_no_go(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, skipped=4)
    assert answer(run_dir, "not applied").ok is False
    assert answer(run_dir, "not applied", max_skipped=0.02).ok
    write_beats(run_dir, *(beats(0, rank=rank, pid=900) for rank in range(2)))  # not yet loaded
    assert answer(run_dir, "not applied").ok is False


def test_a_dead_branch_is_a_no_go(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    write_selection(run_dir, gates={"cmp": 0.4, "sel": 0.6, "win": 0.5})
    assert answer(run_dir, "mean gate", min_gate=0.01).value == pytest.approx(0.4)
    write_selection(run_dir, gates={"cmp": 0.4, "sel": 0.001, "win": 0.5})
    dead = answer(run_dir, "mean gate", min_gate=0.01)
    assert dead.ok is False
    assert "2 layers at step 300: cmp 0.400, sel 0.001, win 0.500" in dead.evidence
    write_selection(run_dir, gates={"cmp": 0.5, "sel": math.nan, "win": 0.5})
    assert answer(run_dir, "mean gate", min_gate=0.01).ok is False


def test_memory_is_judged_at_extended_by_its_peak_and_its_growth(tmp_path: Path) -> None:
    extended = Gate("extended", 1_000)
    write_metrics(tmp_path, 1_000)
    leaking = beats(1_000, rank=1)
    for line in leaking:
        line["memory_gb"] = 20 + line["step"] / 100
    write_beats(tmp_path, beats(1_000), leaking)
    assert answer(tmp_path, "growth", extended).ok is False
    assert answer(tmp_path, "growth", extended).value == pytest.approx(30 / 25 - 1)
    assert answer(tmp_path, "growth", extended, max_memory_growth=0.25).ok
    assert answer(tmp_path, "peak memory of", extended).ok
    assert answer(tmp_path, "peak memory of", extended, max_memory_gb=29.0).ok is False
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/rank0.jsonl").write_text('{"step": 1000, "peak_gb": 61.5}\n{"st')
    assert answer(tmp_path, "peak memory of", extended).value == 61.5
    names = [criterion.name for criterion in judge(tmp_path, SMOKE, CONFIG, patience=0).criteria]
    assert not [name for name in names if "memory" in name]


def test_production_asks_for_a_finite_held_out_loss(tmp_path: Path) -> None:
    end = Gate("production", 300)
    write_run(tmp_path)
    assert answer(tmp_path, "held-out", end).ok
    write_metrics(tmp_path, change=lambda step: {"val_loss": math.nan} if step == 300 else {})
    assert answer(tmp_path, "held-out", end).ok is False


@pytest.mark.parametrize(
    "garbage", [b"", b"\x00\xff\xfe" * 999, b"{}\n[]\nnull\n", b'{"step": "x"}\n{"step": 1e999}\n']
)
def test_spoilt_files_are_a_no_go_with_the_reason_and_never_a_crash(
    tmp_path: Path, garbage: bytes
) -> None:
    (tmp_path / "memory").mkdir()
    names = ("metrics.csv", "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl", "gates.json")
    for name in (*names, "selection.csv", "env.json", "config.yaml", "memory/rank0.jsonl"):
        (tmp_path / name).write_bytes(garbage)
    verdict = judge(tmp_path, Gate("production", 300), LadderConfig(), patience=0)
    assert not verdict.go
    assert "metrics.csv" in verdict.summary
    record(tmp_path, verdict)
    assert read_gates(tmp_path) == [verdict]


def test_lines_torn_in_the_middle_cost_only_themselves(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("metrics.csv", "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl"):
        path = tmp_path / name
        lines = path.read_text().splitlines(keepends=True)
        middle = len(lines) // 2
        torn = [lines[middle][:20] + lines[middle + 1], "\x00\x00\n"]
        path.write_text("".join([*lines[:middle], *torn, *lines[middle + 2 :], lines[-1][:9]]))
    assert judge(tmp_path, SMOKE, CONFIG, patience=0).go
    assert "2 lines could not be read" in answer(tmp_path, "not finite").evidence


def test_a_last_row_that_lost_its_end_is_not_believed(tmp_path: Path) -> None:
    write_metrics(tmp_path, 20)
    path = tmp_path / "metrics.csv"
    row = path.read_text().splitlines()[-1]
    with path.open("a") as file:
        file.write(row.replace("20,", "30,", 1)[:-3])
    table = read_table(path)
    assert ([row["step"] for row in table.rows], table.problem) == ([1, 10, 20], "")


def test_a_run_without_metrics_is_judged_by_its_heartbeats(tmp_path: Path) -> None:
    lines = beats(300)
    for line in lines:
        line["loss"] = 3 + 3 / (line["step"] // 10 + 1)
    write_beats(tmp_path, lines)
    verdict = judge(tmp_path, SMOKE, CONFIG, patience=0)
    assert verdict.go, verdict.summary
    assert {criterion.name for criterion in verdict.unmeasured} >= {"tokens/s, median"}


def test_what_a_real_heartbeat_writes_is_understood_and_waited_for(tmp_path: Path) -> None:
    write_metrics(tmp_path, 4, log_every=1)
    common: dict[str, Any] = {"rank": 0, "backend": "deepspeed-zero1", "seconds": 0.01}
    for start in (0, 2):
        heartbeat = Heartbeat(tmp_path, step=start, **common)
        for step in range(start + 1, start + 3):
            heartbeat.step_start(step)
            heartbeat.enter("forward")
            heartbeat.step_end(step, tokens=64 * step, skipped=1)
        if start:
            verdict = judge(tmp_path, Gate("smoke", 4), CONFIG, patience=60)
        heartbeat.close("finished")
    found = {criterion.name: criterion for criterion in verdict.criteria}
    assert found["steps recorded"].ok
    assert found["slowest rank's step"].value == 4
    assert found["share of steps not applied"].value == 0.25
    history = read_rank(tmp_path, 0)
    assert history.done == [(0, 2), (2, 4)]
    assert (history.processes, history.status, history.backend) == (
        2,
        "finished",
        "deepspeed-zero1",
    )


def test_a_run_that_goes_on_at_a_gate_is_judged_without_waiting_for_a_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, 4, log_every=1)
    heartbeat = Heartbeat(tmp_path, rank=0, backend="", seconds=100, step=4)
    began = time.monotonic()
    judge(tmp_path, Gate("smoke", 4), CONFIG, patience=60)
    heartbeat.close("finished")
    assert time.monotonic() - began < 30


def test_a_process_that_only_said_where_it_will_go_on_has_done_nothing(tmp_path: Path) -> None:
    """A killed run that resumes at 200 without having written of steps 101 to 200."""
    late = beats(300, start=200, pid=900)
    late[0]["step"] = 0
    write_beats(tmp_path, beats(100), late)
    assert read_rank(tmp_path, 0).done == [(0, 100), (200, 300)]


def test_a_rollback_within_a_process_is_not_another_process(tmp_path: Path) -> None:
    lines = beats(100) + [line for line in beats(300, start=60, mono=100.0) if line["step"]][1:]
    write_beats(tmp_path, lines)
    history = read_rank(tmp_path, 0)
    assert (history.processes, history.done, history.step) == (1, [(0, 100), (60, 300)], 300)


def test_verdicts_are_kept_by_gate_and_judging_again_replaces_one(tmp_path: Path) -> None:
    write_run(tmp_path, steps=300)
    bad = judge(tmp_path, SMOKE, replace(CONFIG, max_pause=0.1), patience=0)
    for verdict in (bad, judge(tmp_path, Gate("sanity", 1), CONFIG, patience=0)):
        record(tmp_path, verdict)
    assert [(entry.gate, entry.go) for entry in read_gates(tmp_path)] == [
        ("sanity", True),
        ("smoke", False),
    ]
    good = judge(tmp_path, SMOKE, CONFIG, patience=0)
    record(tmp_path, good)
    assert read_gates(tmp_path)[1:] == [good]
    entries = json.loads((tmp_path / "gates.json").read_text())
    assert [entry["gate"] for entry in entries] == ["sanity", "smoke"]
    assert sorted(path.name for path in tmp_path.glob(".*")) == [], "no drafts are left"


@dataclass(frozen=True)
class Line:
    name: str
    status: str
    detail: str = "said"
    fix: str = ""


def test_preflight_is_a_no_go_where_a_check_fails(tmp_path: Path) -> None:
    good = preflight([Line("torch", "ok"), Line("shm", "warn", "64 MB", "--shm-size 8g")])
    assert good.go
    assert good.criteria[1].evidence == "warn: 64 MB; --shm-size 8g"
    bad = preflight([Line("peer access", "skip"), Line("disk", "fail", "full", "free 9 GB")])
    assert not bad.go
    assert "disk: fail: full; free 9 GB" in bad.summary
    record(tmp_path, bad)
    (found,) = read_gates(tmp_path)
    assert isinstance(found, Verdict)
    assert [criterion.ok for criterion in found.criteria] == [None, False]
