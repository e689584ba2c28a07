"""Steps of the gates, `--until`, and `gates.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.doctor.node import Check
from nsa.gates.criteria import preflight
from nsa.gates.results import (
    Criterion,
    Gate,
    GateResult,
    gate_result,
    read_results,
    record_result,
    schedule,
    until_step,
)
from nsa.monitor.config import LadderConfig


def test_a_run_passes_the_gates_before_its_end_and_then_production() -> None:
    assert schedule(LadderConfig(), 50_000) == [
        Gate("sanity", 1),
        Gate("smoke", 300),
        Gate("extended", 1_000),
        Gate("production", 50_000),
    ]
    assert schedule(LadderConfig(), 300) == [Gate("sanity", 1), Gate("production", 300)]
    assert schedule(LadderConfig(), 1) == [Gate("production", 1)]


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("250", 250),
        ("99999", 50_000),
        ("smoke", 300),
        ("Extended", 1_000),
        ("preflight", 0),
        ("sanity", 1),
        ("production", 50_000),
    ],
)
def test_until_accepts_steps_and_gates(text: str, step: int) -> None:
    assert until_step(text, LadderConfig(), 50_000) == step


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("smok", r"--until smok: neither .* go/no-go gate \(choose from preflight, sanity"),
        ("0", "--until 0: neither a number of steps above 0 nor a go/no-go gate"),
        ("extended", "is at step 1,000, but the run ends at 300; raise --steps"),
    ],
)
def test_until_refuses_other_values_with_the_choice(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        until_step(text, LadderConfig(), 300)


def test_results_are_kept_by_gate_and_a_new_one_replaces_the_old(tmp_path: Path) -> None:
    sanity = gate_result("sanity", 1, [])
    bad = gate_result("smoke", 300, [Criterion("longest pause, seconds", False, 0.5, "", "")])
    for result in (bad, sanity):
        record_result(tmp_path, result)
    assert read_results(tmp_path) == [sanity, bad]
    assert [result.go for result in read_results(tmp_path)] == [True, False]
    good = gate_result("smoke", 300, [Criterion("longest pause, seconds", True, 0.1, "", "")])
    record_result(tmp_path, good)
    assert read_results(tmp_path) == [sanity, good]
    entries = json.loads((tmp_path / "gates.json").read_text())
    assert [set(entry) for entry in entries] == [{"gate", "step", "go", "time", "criteria"}] * 2
    assert set(entries[1]["criteria"][0]) == {"name", "ok", "value", "limit", "evidence"}
    assert sorted(path.name for path in tmp_path.glob(".*")) == [], "no drafts are left"


def test_preflight_is_a_no_go_where_a_check_fails(tmp_path: Path) -> None:
    good = preflight([Check("torch", "ok", "2.13"), Check("shm", "warn", "64 MB", "--shm-size 8g")])
    assert good.go
    assert good.criteria[1].evidence == "warn: 64 MB; --shm-size 8g"
    bad = preflight(
        [Check("peer access", "skip", "one GPU"), Check("disk", "fail", "full", "free 9 GB")]
    )
    assert not bad.go
    assert "disk: fail: full; free 9 GB" in bad.summary
    record_result(tmp_path, bad)
    (stored,) = read_results(tmp_path)
    assert isinstance(stored, GateResult)
    assert [criterion.ok for criterion in stored.criteria] == [None, False]
