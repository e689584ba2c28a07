"""Criteria of the gates: which runs are Go, which are No-Go, and what the evidence says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa.gates.criteria import judge
from nsa.gates.results import Criterion, read_results, record_result
from nsa.gates.schedule import Gate
from nsa.monitor.artifacts import read_table
from nsa.monitor.config import LadderConfig
from tests.gates.files import gate_at, judge_files, load_inputs
from tests.monitor.run_folders import (
    CONFIG,
    beats,
    write_beats,
    write_metrics,
    write_run,
    write_selection,
)

SANITY, SMOKE = gate_at("sanity", 1), gate_at("smoke", 300)


def criterion(run_dir: Path, name: str, gate: Gate = SMOKE, **changes: Any) -> Criterion:
    """The criterion `name` of `gate`, judged with these settings of `monitor.ladder`."""
    result = judge_files(run_dir, gate, replace(CONFIG, **changes))
    assert result.go == all(criterion.ok is not False for criterion in result.criteria)
    (match,) = [criterion for criterion in result.criteria if name in criterion.name]
    return match


def test_a_healthy_run_is_a_go_and_its_evidence_names_the_files(tmp_path: Path) -> None:
    result = judge_files(write_run(tmp_path), SMOKE, LadderConfig())
    assert result.go
    assert [criterion.name for criterion in result.unmeasured] == ["min mean gate"]
    assert all(criterion.evidence for criterion in result.criteria)
    steps = result.criteria[0]
    assert (steps.name, steps.value) == ("steps recorded", 300)
    assert "metrics.csv (rows: 31)" in steps.evidence
    assert "Go (10 of 11 criteria met, 1 not measured)" in result.summary


def test_twenty_steps_never_pass_a_gate_at_three_hundred(tmp_path: Path) -> None:
    """F11: the earlier system's reports claimed "500+ steps" after 10 and 20."""
    result = judge_files(write_run(tmp_path, steps=20), SMOKE, CONFIG)
    assert not result.go
    assert "no record of steps 21-300" in result.summary
    assert {criterion.name for criterion in result.failed} >= {
        "steps recorded",
        "slowest rank's step",
    }


def test_unrecorded_steps_between_two_processes_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        lost = beats(300, rank=rank, start=150, pid=900)
        write_beats(tmp_path, beats(100, rank=rank), lost)
    write_metrics(tmp_path, 100)
    write_metrics(tmp_path, 300, start=150)
    match = criterion(tmp_path, "steps recorded")
    assert match.ok is False
    assert match.value == 250
    assert "steps 101-150" in match.evidence


def test_heartbeats_fill_gaps_between_logged_rows(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10] + lines[20:]))
    assert criterion(tmp_path, "steps recorded").ok


def test_the_slowest_rank_is_named(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_beats(tmp_path, beats(300), beats(299, rank=1))
    match = criterion(tmp_path, "slowest rank")
    assert match.ok is False
    assert "rank 1 is the slowest" in match.evidence
    (tmp_path / "env.json").write_text('{"world_size": 1}')  # resumed on one rank
    assert criterion(tmp_path, "slowest rank").ok
    (tmp_path / "env.json").write_text('{"world_size": 3}')  # the third has no heartbeats
    assert criterion(tmp_path, "slowest rank").value == 0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_one_loss_that_is_not_finite_is_a_no_go(tmp_path: Path, loss: float) -> None:
    write_run(tmp_path)
    write_metrics(tmp_path, change=lambda step: {"loss": loss} if step == 200 else {})
    match = criterion(tmp_path, "non-finite losses")
    assert (match.ok, match.value) == (False, 1)
    assert "step 200" in match.evidence
    assert criterion(tmp_path, "non-finite losses", SANITY).ok, "later steps are not judged"


def test_a_loss_that_does_not_fall_is_a_no_go_from_the_second_gate_on(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_metrics(tmp_path, change=lambda step: {"loss": 3 + step / 1e4})
    assert criterion(tmp_path, "final / initial loss").ok is False
    assert criterion(tmp_path, "final / initial loss", require_fall=False).ok is None
    assert judge_files(tmp_path, SANITY, CONFIG).go


def test_a_hang_is_a_pause_but_saving_and_evaluating_are_not(tmp_path: Path) -> None:
    for name, phase in (("hung", "forward"), ("saving", "save"), ("evaluating", "eval")):
        write_metrics(tmp_path / name)
        write_beats(
            tmp_path / name,
            beats(300),
            beats(300, rank=1, waits={200: (phase, 130.0)}),
        )
    match = criterion(tmp_path / "hung", "longest pause")
    assert match.ok is False
    assert match.value == pytest.approx(130.5, abs=0.1)
    assert "rank 1, before step 201" in match.evidence
    assert criterion(tmp_path / "saving", "longest pause").value == pytest.approx(0.5, abs=0.1)
    assert criterion(tmp_path / "evaluating", "longest pause").ok


def test_a_pause_counts_at_the_first_gate_after_it_and_at_no_later_one(tmp_path: Path) -> None:
    write_run(tmp_path, waits={200: ("forward", 200.0)})
    assert criterion(tmp_path, "longest pause").value == pytest.approx(200.5)
    later = Gate("extended", 300, previous_step=250)
    assert criterion(tmp_path, "longest pause", later).value == pytest.approx(0.5)


def test_a_long_save_with_few_lines_is_no_pause(tmp_path: Path) -> None:
    lines = beats(300, waits={200: ("save", 130.0)})
    saving = [line for line in lines if line["phase"] == "save"]
    write_beats(tmp_path, [line for line in lines if line not in saving[1:]])
    write_metrics(tmp_path)
    assert criterion(tmp_path, "longest pause").value == pytest.approx(0.5, abs=0.1)


def test_steps_after_a_gate_do_not_change_its_result(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=400, waits={300: ("idle", 500.0), 350: ("forward", 500.0)})
    assert judge_files(run_dir, SMOKE, CONFIG).go
    assert not judge_files(run_dir, gate_at("production", 400), CONFIG).go


def test_a_hang_before_a_kill_is_a_pause_but_the_time_to_the_resume_is_not(
    tmp_path: Path,
) -> None:
    write_metrics(tmp_path)
    first, second = beats(100), beats(300, start=90, pid=900, mono=100_000.0)
    write_beats(tmp_path / "killed", first, second)
    write_metrics(tmp_path / "killed")
    assert criterion(tmp_path / "killed", "longest pause").value == pytest.approx(0.5, abs=0.1)
    hung = beats(100, waits={100: ("backward", 500.0)})
    write_beats(tmp_path / "hung", hung, second)
    write_metrics(tmp_path / "hung")
    assert criterion(tmp_path / "hung", "longest pause").value == pytest.approx(500, abs=1)


def test_without_heartbeats_pauses_ranks_and_growth_are_not_measured(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1_000)
    for name in ("longest pause", "slowest rank", "growth"):
        assert criterion(tmp_path, name, gate_at("extended", 1_000)).ok is None


def test_unsteady_step_times_are_a_no_go_and_too_few_are_not_judged(tmp_path: Path) -> None:
    write_metrics(tmp_path, change=lambda step: {"seconds": 1.5} if step % 50 == 0 else {})
    assert criterion(tmp_path, "p90 / median step time").ok is False
    assert criterion(tmp_path, "p90 / median step time", max_step_spread=4.0).ok
    assert criterion(tmp_path, "p90 / median step time", max_step_spread=0.0).ok is None
    few = criterion(tmp_path, "p90 / median step time", gate_at("smoke", 150))
    assert few.ok is None
    assert "15 logged steps were timed after warm-up, 20 are needed" in few.evidence


def test_speed_is_judged_from_the_gate_before(tmp_path: Path) -> None:
    slow = {"tokens_per_s": 30.0}
    write_metrics(tmp_path, 400, change=lambda step: slow if 1 < step <= 300 else {})
    assert criterion(tmp_path, "median tokens/s").value == 30.0
    assert criterion(tmp_path, "median tokens/s").ok is False
    assert criterion(tmp_path, "median tokens/s", gate_at("extended", 400)).ok


def test_the_first_step_of_each_process_does_not_count_as_slow(tmp_path: Path) -> None:
    first = {"tokens_per_s": None, "seconds": 400.0}
    write_metrics(tmp_path, change=lambda step: first if step % 50 == 0 else {})
    assert criterion(tmp_path, "p90 / median step time").ok


def test_idle_or_unequally_busy_gpus_are_a_no_go(tmp_path: Path) -> None:
    for name, (first, second) in {"idle": (0.5, 0.5), "uneven": (0.99, 0.75)}.items():
        write_metrics(tmp_path / name)
        write_beats(tmp_path / name, beats(300, gpu_busy=first))
        write_beats(tmp_path / name, beats(300, rank=1, gpu_busy=second))
    assert criterion(tmp_path / "idle", "min GPU utilization").ok is False
    assert criterion(tmp_path / "idle", "GPU utilization spread").ok
    assert criterion(tmp_path / "uneven", "min GPU utilization", min_gpu_busy=0.7).ok
    assert criterion(tmp_path / "uneven", "min GPU utilization").ok is False
    assert criterion(tmp_path / "uneven", "GPU utilization spread").ok is False
    write_beats(tmp_path / "blind", beats(300), beats(300, rank=1, gpu_busy=None))
    assert criterion(tmp_path / "blind", "min GPU utilization").ok is None


def test_skipped_steps_may_have_non_finite_losses_and_others_may_not(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, skipped=1)
    write_metrics(run_dir, change=lambda step: {"loss": math.nan} if step == 150 else {})
    assert criterion(run_dir, "non-finite losses").ok
    write_metrics(run_dir, change=lambda step: {"loss": math.inf} if step in (150, 200) else {})
    assert criterion(run_dir, "non-finite losses").ok is False


def test_memory_growth_is_not_judged_in_a_run_of_a_few_steps(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=60)
    assert criterion(run_dir, "growth", gate_at("production", 60)).ok is None


def test_too_many_skipped_steps_are_a_no_go(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, skipped=4)
    assert criterion(run_dir, "skipped-step fraction").ok is False
    assert criterion(run_dir, "skipped-step fraction", max_skipped=0.02).ok
    write_beats(
        run_dir, *(beats(0, rank=rank, pid=900) for rank in range(2))
    )  # before the checkpoint is loaded
    assert criterion(run_dir, "skipped-step fraction").ok is False


def test_a_dead_branch_is_a_no_go(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    write_selection(run_dir, gates={"cmp": 0.4, "sel": 0.6, "win": 0.5})
    assert criterion(run_dir, "min mean gate", min_gate=0.01).value == pytest.approx(0.4)
    write_selection(run_dir, gates={"cmp": 0.4, "sel": 0.001, "win": 0.5})
    dead = criterion(run_dir, "min mean gate", min_gate=0.01)
    assert dead.ok is False
    assert "2 layers at step 300: cmp 0.400, sel 0.001, win 0.500" in dead.evidence
    write_selection(run_dir, gates={"cmp": 0.5, "sel": math.nan, "win": 0.5})
    assert criterion(run_dir, "min mean gate", min_gate=0.01).ok is False


def test_selection_is_judged_at_extended_by_its_recall_over_random_blocks(tmp_path: Path) -> None:
    extended, name = gate_at("extended", 1_000), "recall of selected / random blocks"
    run_dir = write_run(tmp_path, 1_000)
    gates = {"cmp": 0.4, "sel": 0.3, "win": 0.5}

    def judged(
        *layers: tuple[float, float] | tuple[None, None], gate: Gate = extended
    ) -> Criterion:
        """Two layers' recall and that of random blocks."""
        each = [dict(zip(("recall", "recall_random"), layer, strict=True)) for layer in layers]
        write_selection(run_dir, gate.step, gates=gates, changes=each)
        return criterion(run_dir, name, gate)

    good = judged((0.41, 0.4), (0.6, 0.4))
    assert good.ok
    assert good.value == pytest.approx(1.5)
    bad = judged((0.41, 0.4), (0.38, 0.4))
    assert bad.ok is False
    assert bad.limit == "at least 1.05"
    assert "in layer 0, the best of 2, selected blocks hold 41.0% of the attention" in bad.evidence
    assert "random ones would hold 40.0%" in bad.evidence
    assert criterion(run_dir, name, extended, min_recall=1.02).ok
    nothing_to_select = judged((None, None), (None, None))
    assert nothing_to_select.ok is None
    assert "it needs the selector loss, and more blocks than are selected" in (
        nothing_to_select.evidence
    )
    early = judged((0.4, 0.4), (0.4, 0.4), gate=gate_at("extended", 50))
    assert early.ok is None
    assert "50 steps, 100 are needed" in early.evidence
    names = [criterion.name for criterion in judge_files(run_dir, SMOKE, CONFIG).criteria]
    assert name not in names


def test_memory_is_judged_at_extended_by_its_peak_and_its_growth(tmp_path: Path) -> None:
    extended = gate_at("extended", 1_000)
    write_metrics(tmp_path, 1_000)
    leaking = beats(1_000, rank=1)
    for line in leaking:
        line["memory_gb"] = 20 + line["step"] / 100
    write_beats(tmp_path, beats(1_000), leaking)
    assert criterion(tmp_path, "growth", extended).ok is False
    assert criterion(tmp_path, "growth", extended).value == pytest.approx(30 / 25 - 1)
    assert criterion(tmp_path, "growth", extended, max_memory_growth=0.25).ok
    assert criterion(tmp_path, "peak memory of", extended).ok
    assert criterion(tmp_path, "peak memory of", extended, max_memory_gb=29.0).ok is False
    names = [criterion.name for criterion in judge_files(tmp_path, SMOKE, CONFIG).criteria]
    assert not [name for name in names if "memory" in name]


def test_dense_steps_count_neither_in_growth_nor_in_recall(tmp_path: Path) -> None:
    """Attention becomes sparse at step 500, with twice the memory, which then stays."""
    extended = gate_at("extended", 1_000)
    write_metrics(tmp_path, 1_000)
    lines = beats(1_000)
    for line in lines:
        line["memory_gb"] = 10.0 if line["step"] <= 500 else 20.0
    write_beats(tmp_path, lines)

    def judged(sparse_after: int) -> dict[str, Criterion]:
        inputs = replace(load_inputs(tmp_path, extended), sparse_after=sparse_after)
        return {x.name: x for x in judge(extended, inputs, CONFIG).criteria}

    def growth(sparse_after: int) -> Criterion:
        (found,) = [x for name, x in judged(sparse_after).items() if "growth" in name]
        return found

    assert growth(0).ok is False
    assert growth(500).ok
    assert growth(950).ok is None  # 50 sparse steps are too few
    (recall,) = [x for name, x in judged(1_000).items() if "recall" in name]
    assert recall.evidence == "attention is dense until step 1,000"


def test_production_requires_a_finite_validation_loss(tmp_path: Path) -> None:
    end = gate_at("production", 300)
    write_run(tmp_path)
    assert criterion(tmp_path, "validation loss", end).ok
    write_metrics(tmp_path, change=lambda step: {"val_loss": math.nan} if step == 300 else {})
    assert criterion(tmp_path, "validation loss", end).ok is False


@pytest.mark.parametrize(
    "garbage", [b"", b"\x00\xff\xfe" * 999, b"{}\n[]\nnull\n", b'{"step": "x"}\n{"step": 1e999}\n']
)
def test_corrupt_files_are_a_no_go_with_the_reason_and_never_a_crash(
    tmp_path: Path, garbage: bytes
) -> None:
    names = ("metrics.csv", "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl", "gates.json")
    for name in (*names, "selection.csv", "env.json", "config.yaml"):
        (tmp_path / name).write_bytes(garbage)
    result = judge_files(tmp_path, gate_at("production", 300), LadderConfig())
    assert not result.go
    assert "metrics.csv" in result.summary
    record_result(tmp_path, result)
    assert read_results(tmp_path) == [result]


def test_torn_lines_cost_only_themselves(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("metrics.csv", "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl"):
        path = tmp_path / name
        lines = path.read_text().splitlines(keepends=True)
        middle = len(lines) // 2
        torn = [lines[middle][:20] + lines[middle + 1], "\x00\x00\n"]
        path.write_text("".join([*lines[:middle], *torn, *lines[middle + 2 :], lines[-1][:9]]))
    assert judge_files(tmp_path, SMOKE, CONFIG).go
    assert "2 lines could not be read" in criterion(tmp_path, "non-finite losses").evidence


def test_a_torn_last_row_is_ignored(tmp_path: Path) -> None:
    write_metrics(tmp_path, 20)
    path = tmp_path / "metrics.csv"
    row = path.read_text().splitlines()[-1]
    with path.open("a") as file:
        file.write(row.replace("20,", "30,", 1)[:-3])
    table = read_table(path)
    assert ([row["step"] for row in table.rows], table.problem) == ([1, 10, 20], "")


def test_a_run_without_metrics_is_judged_by_its_heartbeats(tmp_path: Path) -> None:
    write_beats(tmp_path, beats(300))
    result = judge_files(tmp_path, SMOKE, CONFIG)
    assert result.go, result.summary
    assert {criterion.name for criterion in result.unmeasured} >= {"median tokens/s"}
