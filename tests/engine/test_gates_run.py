"""The gates of a run, and the flags that end or look into it early, on real engines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.engine.runs import TINY, alone, deepspeed, losses, succeed


def verdicts(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {gate["gate"]: gate for gate in json.loads((run_dir / "gates.json").read_text())}


def test_the_ladder_is_climbed_gate_by_gate_on_one_run(tmp_path: Path) -> None:
    """Each resume stops behind the next gate, and the losses are those of one uninterrupted run."""
    steps = ["--set=monitor.ladder.smoke=3", "--set=monitor.ladder.extended=5", "--steps=7"]
    begin = [*TINY, *steps, "--set=train.warmup_steps=1", "--set=train.eval_every=0"]
    succeed(deepspeed("m7c.py", *begin, "--until=preflight", "--run-dir=run", folder=tmp_path))
    assert list(verdicts(tmp_path / "run")) == ["preflight"]
    assert not (tmp_path / "run/checkpoints/latest").exists()
    for gate, step in (("sanity", 1), ("smoke", 3), ("extended", 5), ("production", 7)):
        go_on = [f"--until={gate}", "--run-dir=run", "--resume"]
        output = succeed(deepspeed("m7c.py", *go_on, folder=tmp_path))
        assert f"gate {gate} at step {step}: Go" in output
        assert max(losses(tmp_path / "run")) == step
    found = verdicts(tmp_path / "run")
    assert list(found) == ["preflight", "sanity", "smoke", "extended", "production"]
    assert all(verdict["go"] for verdict in found.values())
    checks = {check["name"]: check for check in found["preflight"]["criteria"]}
    assert checks["config"]["evidence"] == "the same on every rank"
    assert checks["dry batch"]["ok"]
    succeed(deepspeed("m7c.py", *begin, "--run-dir=whole", folder=tmp_path))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_no_go_ends_every_rank_with_3_a_reason_and_a_checkpoint_to_go_on_from(
    tmp_path: Path,
) -> None:
    impossible = ["--set=monitor.ladder.max_memory_gb=0.001", "--set=monitor.ladder.smoke=3"]
    impossible += ["--set=monitor.ladder.extended=4", "--steps=6"]
    result = deepspeed("m7c.py", *TINY, *impossible, "--run-dir=run", folder=tmp_path)
    assert result.returncode == 3
    assert "m7c: gate extended at step 4: No-Go" in result.stderr
    assert "peak memory" in result.stderr
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step00000004"
    found = verdicts(tmp_path / "run")
    assert found["smoke"]["go"]
    assert not found["extended"]["go"]
    again = deepspeed("m7c.py", "--run-dir=run", "--resume", folder=tmp_path)
    assert again.returncode == 3, "a No-Go holds as long as its reason does"
    assert max(losses(tmp_path / "run")) == 4
    fixed = ["--run-dir=run", "--resume", "--set=monitor.ladder.max_memory_gb=60"]
    succeed(deepspeed("m7c.py", *fixed, folder=tmp_path))
    assert verdicts(tmp_path / "run")["production"]["go"]


def test_the_time_limit_saves_and_ends_well_and_the_next_start_goes_on(tmp_path: Path) -> None:
    begin = [*TINY, "--steps=5000", "--set=train.eval_every=0", "--set=checkpoint.every=0"]
    limited = [*begin, "--time-limit=2s", "--run-dir=run"]
    output = succeed(deepspeed("m7c.py", *limited, folder=tmp_path))
    assert "preempted: --time-limit" in output
    step = max(losses(tmp_path / "run"))
    again = ["--run-dir=run", "--resume", f"--until={step + 1}"]
    output = succeed(deepspeed("m7c.py", *again, folder=tmp_path))
    assert f"steps {step + 1} to {step + 1} on 2 ranks" in output


def test_chosen_steps_are_traced_and_the_others_are_not(tmp_path: Path) -> None:
    chosen = ["--steps=4", "--profile-steps=2-3", "--run-dir=run"]
    succeed(alone("m7c.py", *TINY, *chosen, folder=tmp_path))
    written = (tmp_path / "run/profile/rank0_steps2-3.json.gz").read_bytes()
    trace = json.loads(gzip.decompress(written))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert len([name for name in names if name.startswith("ProfilerStep#")]) <= 2
    assert any("attention" in name for name in names)


def test_a_run_on_another_number_of_ranks_goes_on_where_it_stood(tmp_path: Path) -> None:
    """The first loss after the change is the one that the old number of ranks would have had."""
    same_batch = {2: "--set=train.accumulation=1", 1: "--set=train.accumulation=2"}
    begin = [*TINY, same_batch[2], "--steps=6"]
    succeed(deepspeed("m7c.py", *begin, "--run-dir=whole", folder=tmp_path))
    succeed(deepspeed("m7c.py", *begin, "--until=3", "--run-dir=run", folder=tmp_path))
    refused = alone("m7c.py", "--run-dir=run", "--resume", same_batch[1], folder=tmp_path)
    assert refused.returncode == 2
    assert "--universal" in refused.stderr
    onwards = ["--run-dir=run", "--resume", "--universal"]
    succeed(alone("m7c.py", *onwards, same_batch[1], "--until=4", folder=tmp_path))
    succeed(deepspeed("m7c.py", *onwards, same_batch[2], folder=tmp_path))
    whole, changed = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert sorted(changed) == sorted(whole)
    assert all(abs(changed[step] - whole[step]) < 0.01 for step in whole)
    assert all(changed[step] == whole[step] for step in (1, 2, 3))


def test_a_run_that_was_ended_behind_its_last_save_is_finished_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    succeed(alone("m7c.py", *TINY, "--steps=2", "--run-dir=run", folder=tmp_path))
    output = succeed(alone("m7c.py", "--run-dir=run", "--resume", folder=tmp_path))
    assert "no step to take" in output
    assert "gate production at step 2: Go" in output
    assert sorted(losses(tmp_path / "run")) == [1, 2]
