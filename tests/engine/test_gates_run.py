"""Gates of real runs, and the flags that stop or trace a run early."""

import contextlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nsa.checkpoint.saver import SaveFailed
from nsa.data.batches import Batch
from nsa.engine import loop
from nsa.engine.config import RunConfig, TrainConfig
from nsa.engine.process_group import Ranks
from nsa.engine.run_request import TrainState
from nsa.engine.shutdown import ShutdownMonitor
from nsa.engine.telemetry import Telemetry
from nsa.gates.criteria import GateInputs
from nsa.gates.results import Gate, GateResult, gate_result
from nsa.monitor.artifacts import RankHistory, last_beat
from nsa.monitor.config import LadderConfig
from nsa.monitor.observer import StepRecord
from nsa.monitor.throughput import Throughput
from tests.disks import files_no_longer_than
from tests.engine.runs import (
    TINY,
    losses,
    on_one_rank,
    on_two_ranks,
    read_metrics,
    refused,
    succeed,
)
from tests.engine.small import small_request


def read_gates(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {gate["gate"]: gate for gate in json.loads((run_dir / "gates.json").read_text())}


def test_a_run_resumes_from_gate_to_gate_and_takes_no_step_at_its_last_one(tmp_path: Path) -> None:
    steps = ["--set=monitor.ladder.smoke=3", "--set=monitor.ladder.extended=5", "--steps=7"]
    settings = [*TINY, *steps, "--set=train.warmup_steps=1", "--set=train.eval_every=6"]
    settings += ["--set=monitor.log_every=4", "--until=preflight", "--run-dir=run"]
    output = succeed(on_one_rank("m7c.py", *settings, folder=tmp_path))
    assert "stopped at --until preflight of 7 steps; continue with --resume" in output
    assert list(read_gates(tmp_path / "run")) == ["preflight"]
    assert not (tmp_path / "run/checkpoints/latest").exists()
    for gate, step in (("extended", 5), ("production", 7)):
        arguments = [f"--until={gate}", "--run-dir=run", "--resume"]
        output = succeed(on_one_rank("m7c.py", *arguments, folder=tmp_path))
        assert f"go/no-go gate {gate} at step {step}: Go" in output
        stopped = f"stopped at --until {step} of 7 steps; continue with --resume"
        assert output.splitlines().count("finished" if step == 7 else stopped) == 1
        assert max(losses(tmp_path / "run")) == step
    gates = read_gates(tmp_path / "run")
    assert list(gates) == ["preflight", "sanity", "smoke", "extended", "production"]
    assert all(gate["go"] for gate in gates.values())
    for name, step in (("sanity", 1), ("smoke", 3), ("extended", 5), ("production", 7)):
        recorded = gates[name]["criteria"][0]
        assert (recorded["name"], recorded["value"]) == ("steps recorded", step)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 3, 4, 5, 6, 7], "gates' and evaluated steps too"
    output = succeed(on_one_rank("m7c.py", "--run-dir=run", "--resume", folder=tmp_path))
    heading = r"m7c \(demo\): \d\d,\d{3} parameters, no step to take on 1 rank, in run\n"
    assert re.search(heading, output)
    assert "gate production at step 7: Go" in output
    assert read_metrics(tmp_path / "run") == rows


def test_a_no_go_ends_every_rank_with_3_a_reason_and_a_checkpoint(tmp_path: Path) -> None:
    impossible = ["--set=monitor.ladder.max_memory_gb=0.001", "--set=monitor.ladder.smoke=3"]
    impossible += ["--set=monitor.ladder.extended=4", "--steps=6"]
    result = on_two_ranks("m7c.py", *TINY, *impossible, "--run-dir=run", folder=tmp_path)
    assert result.returncode == 3
    assert "m7c: go/no-go gate extended at step 4: No-Go" in result.stderr
    assert "peak memory" in result.stderr
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step00000004"
    gates = read_gates(tmp_path / "run")
    assert gates["smoke"]["go"]
    assert gates["smoke"]["criteria"][0]["evidence"].endswith("heartbeats of 2 ranks")
    assert not gates["extended"]["go"]
    checks = {check["name"]: check for check in gates["preflight"]["criteria"]}
    assert checks["config"]["evidence"] == "the same on every rank"
    assert checks["gradient check"]["ok"]
    again = on_two_ranks("m7c.py", "--run-dir=run", "--resume", folder=tmp_path)
    assert again.returncode == 3, "a No-Go stands until its cause is fixed"
    assert max(losses(tmp_path / "run")) == 4
    fixed = ["--run-dir=run", "--resume", "--set=monitor.ladder.max_memory_gb=60"]
    succeed(on_two_ranks("m7c.py", *fixed, folder=tmp_path))
    assert read_gates(tmp_path / "run")["production"]["go"]


def test_evaluation_and_saving_are_phases_and_a_failed_save_is_logged_or_raised() -> None:
    phases, messages, batch = list[str](), list[str](), torch.zeros(1, 2, dtype=torch.int64)
    stops = iter([None, None, "SIGTERM"])

    class Engine:
        module = None
        eval = partial(phases.append, "evaluates")
        train = partial(phases.append, "trains")

        def __call__(self, *_: object, **__: object) -> torch.Tensor:
            assert not torch.is_grad_enabled(), "no graph is kept"
            return torch.ones(())

    def save(step: int, state: dict[str, Any]) -> None:
        assert phases == ["save"]
        raise SaveFailed("the disk is full")

    run: Any = Mock(config=RunConfig(), state=TrainState(step=3), engine=Engine(), saved_step=0)
    run.shutdown, run.device, run.teacher = ShutdownMonitor(), torch.device("cpu"), None
    run.telemetry.enter, run.observers.on_message = phases.append, messages.append
    run.throughput.paused, run.saver.save = contextlib.nullcontext, save
    run.data.validation.batches = lambda rank: [Batch(batch, batch)] * 2
    run.collectives.barrier = lambda *_, **__: (next(stops), 0)
    loop._save(run, required=False)
    assert (phases, messages) == (["save", "idle"], ["NOT SAVED: the disk is full"])
    phases.clear()
    with pytest.raises(SaveFailed):
        loop._save(run)
    phases.clear()
    assert loop.evaluate(run) == (None, []), "a signal ends it"
    assert phases == ["eval", "evaluates", "trains"]


def test_between_logged_steps_nothing_is_measured_and_only_the_last_save_is_left_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F5 in docs/design/security.md: statistics stalled the runs that this project replaces."""
    config = RunConfig(train=TrainConfig(steps=9, dense_steps=3, eval_every=4))
    config.monitor.log_every, config.checkpoint.every = 3, 3
    done = dict[str, list[object]](armed=[], logged=[], saved=[], skipped=[], dtypes=[])

    def note(what: str, *more: object) -> None:
        done[what].append((run.state.step, *more) if more else run.state.step)

    def train_step(run: Any, batches: object, labels: object) -> None:
        run.state.step += 1

    run: Any = Mock(config=config, gates=[Gate("sanity", 8)], state=TrainState(step=1))
    run.request.stop_step, run.request.run_dir, run.ranks = 9, Path(), Ranks(0, 0, 1)
    run.health.arm = partial(note, "armed")
    run.guard.handle_skipped_step = lambda *_: note("skipped")
    run.engine.was_step_applied = lambda: run.state.step != 5
    monkeypatch.setattr(loop, "fetch_on_all_ranks", lambda *_: (None, [], 0))
    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(loop, "write_dtypes", lambda *_: note("dtypes"))
    monkeypatch.setattr(loop, "_log", lambda run, loss, evaluates: note("logged", evaluates))
    monkeypatch.setattr(loop, "_save", lambda run, required: note("saved", required))
    monkeypatch.setattr(loop, "_judge_if_due", lambda _: None)
    assert loop._train_steps(run) is None
    evaluated = [(3, False), (4, True), (6, False), (8, True), (9, True)]
    assert done["logged"] == evaluated
    assert done["armed"] == [3, 5, 7, 8], "before steps 4, 6, 8 and 9, which are sparse"
    assert done["saved"] == [(3, False), (6, False)]
    assert (done["skipped"], done["dtypes"]) == ([5], [2])


def judging_run(run_dir: Path, messages: list[str]) -> Any:
    """What `loop._judge` needs of rank 0 of a run on a GPU."""
    run = Mock(config=RunConfig(), device=torch.device("cuda"))
    run.request.run_dir, run.observers.on_message = run_dir, messages.append
    return run


def test_a_gate_is_judged_for_the_runs_phase_weights_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[object, ...]] = []

    def judge(gate: Gate, inputs: GateInputs, ladder: LadderConfig) -> GateResult:
        judged.append((inputs.step, inputs.new_weights, inputs.switch_step, inputs.on_gpu))
        return gate_result(gate.name, gate.step, [])

    monkeypatch.setattr(loop, "judge", judge)
    run = judging_run(tmp_path, [])
    for start, dense_steps in ((None, 5), ("runs/other", 0)):
        run.config.train = TrainConfig(start_from=start, dense_steps=dense_steps)
        assert loop._judge(run, Gate("smoke", 300), [RankHistory(0)]) is None
    assert judged == [(300, True, 5, True), (300, False, 0, True)]


def test_gates_evaluation_and_saving_take_no_time_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now, records = [0.0], list[StepRecord]()

    def take_time(*_: object) -> None:
        now[0] += 100

    monkeypatch.setattr(loop, "_judge", take_time)
    monkeypatch.setattr(loop, "evaluate", lambda run: (take_time(), []))
    monkeypatch.setattr(loop, "dist", Mock(get_world_size=lambda: 2))
    run: Any = Mock(config=RunConfig(), gates=[Gate("smoke", 3)], saved_step=0)
    run.state, run.ranks = TrainState(step=3, tokens=64, skipped=1), Ranks(0, 0, 1)
    run.throughput = Throughput(flops_per_token=1, peak=None, clock=lambda: now[0])
    run.collectives.gather = lambda value, kind: [value]
    run.health.read, run.engine.get_global_grad_norm = list, lambda: None
    run.saver.save, run.observers.on_step = take_time, records.append
    run.throughput.step(64)
    loop._judge_if_due(run)
    loop._log(run, torch.tensor(3.0), evaluates=True)
    loop._save(run)
    now[0] += 1
    run.throughput.step(64)
    assert (now[0], run.throughput.read()["seconds"]) == (301, 1)
    (record,) = records
    assert (record.loss, record.val_loss, record.bits_per_byte) == (1.5, None, None), "of 2 ranks"


def test_a_gate_whose_evidence_a_rank_could_not_write_is_not_judged(tmp_path: Path) -> None:
    messages: list[str] = []
    run = judging_run(tmp_path, messages)
    telemetry = Telemetry(small_request(f"--run-dir={tmp_path}"), Ranks(1, 1, 2), TrainState())
    history = telemetry.history()
    assert (history.problem, history.backend) == ("", "deepspeed-zero1")
    with files_no_longer_than(0):
        telemetry.step_end(TrainState(step=1))
        histories = [RankHistory(0), telemetry.history()]
    telemetry.csv_files = Mock(flush=lambda: False)  # of rank 0
    assert telemetry.history().problem == "the disk did not take the newest lines"
    telemetry.profiler = Mock()
    telemetry.close("finished")
    telemetry.profiler.close.assert_called_once_with()  # writes the trace of an early end
    beat = last_beat(tmp_path / "heartbeat_rank1.jsonl")
    assert beat is not None
    assert (beat["step"], beat["phase"]) == (1, "idle")
    assert loop._judge(run, Gate("smoke", 300), histories) is None
    (message,) = messages
    assert message.startswith("go/no-go gate smoke is NOT JUDGED: ")
    assert "rank 1: the disk did not take the newest lines" in message
    assert not (tmp_path / "gates.json").exists()


def test_the_time_limit_saves_and_the_next_start_resumes(tmp_path: Path) -> None:
    settings = [*TINY, "--steps=5000", "--set=train.eval_every=0", "--set=checkpoint.every=0"]
    limited = [*settings, "--time-limit=2s", "--run-dir=run"]
    output = succeed(on_one_rank("m7c.py", *limited, folder=tmp_path))
    assert re.search(r"preempted: --time-limit.*; resume: --run-dir run --resume", output)
    step = max(losses(tmp_path / "run"))
    again = ["--run-dir=run", "--resume", f"--until={step + 1}"]
    output = succeed(on_one_rank("m7c.py", *again, folder=tmp_path))
    assert f"steps {step + 1} to {step + 1} on 1 rank" in output


@pytest.mark.full  # tests/checkpoint/test_universal.py: the same at the level of the engine
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """The first loss after the change is the one that the old number of ranks would have had."""
    same_batch = {2: "--set=train.accumulation=1", 1: "--set=train.accumulation=2"}
    settings = [*TINY, same_batch[2], "--steps=6"]
    succeed(on_two_ranks("m7c.py", *settings, "--run-dir=uninterrupted", folder=tmp_path))
    succeed(on_two_ranks("m7c.py", *settings, "--until=3", "--run-dir=run", folder=tmp_path))
    other = on_one_rank("m7c.py", "--run-dir=run", "--resume", same_batch[1], folder=tmp_path)
    assert "--universal" in refused(other)
    resume = ["--run-dir=run", "--resume", "--universal"]
    succeed(on_one_rank("m7c.py", *resume, same_batch[1], "--until=4", folder=tmp_path))
    succeed(on_two_ranks("m7c.py", *resume, same_batch[2], folder=tmp_path))
    expected, changed = losses(tmp_path / "uninterrupted"), losses(tmp_path / "run")
    assert sorted(changed) == sorted(expected)
    assert all(abs(changed[step] - expected[step]) < 0.01 for step in expected)
    assert all(changed[step] == expected[step] for step in (1, 2, 3))
