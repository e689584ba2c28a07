"""Recipes as users start them: what runs write, what resumes, what is refused."""

import csv
import gzip
import json
import math
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
import yaml
from deepspeed.accelerator import get_accelerator

from nsa.engine import recipe as recipes
from nsa.engine.config import AUTO, RunConfig, learning_rate, read_saved_config, resolve_config
from nsa.engine.loop import executed_flops
from nsa.engine.recipe import Recipe
from nsa.engine.telemetry import build_observers
from nsa.monitor.observer import SELECTOR_STATISTICS, BackgroundWriter
from nsa.monitor.outputs import CsvObserver
from tests.engine import known_peak
from tests.engine.runs import (
    TINY,
    ds_config,
    load_profile,
    losses,
    on_one_rank,
    on_two_ranks,
    read_metrics,
    refused,
    succeed,
)
from tests.engine.small import small, small_request
from tests.engine.test_trackers import write_config
from tests.monitor.test_environment import dtypes_of
from tests.monitor.test_outputs import read_scalars, read_texts
from tests.ranks import free_port

FP16_WORKS = torch.float16 in get_accelerator().supported_dtypes()


class FinishedRun(NamedTuple):
    dir: Path
    output: str
    port: int


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An uninterrupted run of 8 steps on two ranks, with packed documents."""
    folder, port = tmp_path_factory.mktemp("runs"), free_port()
    settings = ("data.packing=documents", "train.accumulation=2", "monitor.memory_every=4")
    arguments = ["--steps=8", "--profile-steps=2-3", *(f"--set={x}" for x in settings)]
    recipe = known_peak.__file__
    output = succeed(on_two_ranks(recipe, *TINY, *arguments, folder=folder, port=port))
    return FinishedRun(folder / "runs/m7c-demo", output, port)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process that was stopped after one of its two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    flags = ["--steps=2", "--until=1", "--run-dir=run", "--set=attention.branches=cmp+sel+win"]
    flags += ["--set=attention.selector_loss=0"]
    succeed(on_one_rank("m7c.py", *TINY, *flags, folder=folder))
    return folder / "run"


def test_metrics_have_a_row_for_each_step_with_sound_values(finished: FinishedRun) -> None:
    rows = read_metrics(finished.dir)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["tokens"] for row in rows] == [step * 96 * 2 * 2 * 2 for step in range(1, 9)]
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [4, 8]
    last = rows[-1]
    assert rows[0]["loss"] == pytest.approx(math.log(320), rel=0.1)
    assert last["loss"] < rows[0]["loss"]
    config, _ = read_saved_config(finished.dir / "config.yaml")
    of_a_rank = executed_flops(config, 0) / (2 * known_peak.PEAK)
    assert rows[0]["mfu"] is None, "the first step warms up"
    for row in rows[1:]:
        assert row["mfu"] / row["tokens_per_s"] == pytest.approx(of_a_rank, rel=1e-3)
    assert all(row["grad_norm"] > 0 and row["memory_gb"] > 0 for row in rows)
    rates = [learning_rate(step, config.train) for step in range(8)]
    assert [row["lr"] for row in rows] == rates
    assert len(set(rates)) == 7, "the schedule changes in nearly each step"


def test_bits_per_byte_are_bits_per_token_over_the_bytes_of_a_token(tmp_path: Path) -> None:
    """Documents of three bytes and the token that ends them: 3/4 of a byte per token."""
    source = tmp_path / "text.jsonl"
    source.write_text("".join(f'{{"text": "{number:03}"}}\n' for number in range(1_000)) * 4)
    flags = ["--steps=1", "--set=train.warmup_steps=1", f"--set=data.source={source}"]
    flags += ["--set=data.held_out=0.5", "--run-dir=run", "--set=monitor.tensorboard=false"]
    (tmp_path / "run/report.md").mkdir(parents=True)  # a report that fails costs a warning
    result = on_one_rank("m7c.py", *TINY, *flags, folder=tmp_path)
    succeed(result)
    assert "report.md not written: IsADirectoryError" in result.stderr
    assert not (tmp_path / "run/tensorboard").exists(), "which a setting switches off"
    (row,) = read_metrics(tmp_path / "run")
    assert row["bits_per_byte"] == pytest.approx(row["val_loss"] / math.log(2) / 0.75, rel=1e-4)


def test_the_environment_names_profile_and_missing_accelerator(finished: FinishedRun) -> None:
    env = json.loads((finished.dir / "env.json").read_text())
    assert (env["recipe"], env["profile"], env["world_size"]) == ("m7c", "demo", 2)
    assert "NO ACCELERATOR FOUND" in env["notes"][0]
    assert env["notes"][0] in finished.output


def test_the_table_of_dtypes_has_those_of_the_wrapped_optimizer(finished: FinishedRun) -> None:
    table = dtypes_of(finished.dir)
    assert table["embed"] == ["Embedding", "bfloat16"]
    assert table["exp_avg_sq"] == ["float32"]
    assert table["updated"][-1] == table["accumulated"][-1] == "float32"


def test_memory_is_recorded_around_the_first_and_every_nth_step(finished: FinishedRun) -> None:
    for rank in range(2):
        lines = (finished.dir / f"memory/rank{rank}.jsonl").read_text().splitlines()
        taken = [(line["step"], line["when"]) for line in map(json.loads, lines)]
        assert taken == [(step, when) for step in (1, 4, 8) for when in ("before", "after")]


def test_only_the_requested_steps_are_traced(finished: FinishedRun) -> None:
    traces = sorted(path.name for path in (finished.dir / "profile").iterdir())
    assert traces == ["rank0_steps2-3.json.gz", "rank1_steps2-3.json.gz"]
    trace = json.loads(gzip.decompress((finished.dir / "profile" / traces[0]).read_bytes()))
    names = Counter(event.get("name", "") for event in trace["traceEvents"])
    assert names["Optimizer.step#AdamW.step"] == 2, "one for each traced step"
    assert any("attention" in name for name in names)


def test_tensorboard_holds_the_scalars_settings_and_texts(finished: FinishedRun) -> None:
    folder = finished.dir / "tensorboard"
    assert len(list(folder.iterdir())) == 1, "only rank 0 writes"
    scalars = read_scalars(folder)
    tags = scalars.keys()
    assert {"train/loss", "train/lr", "train/grad_norm", "train/skipped_steps"} <= tags
    assert {"eval/loss", "eval/bits_per_byte", "speed/tokens_per_s", "memory/peak_gb"} <= tags
    of_deepspeed = [tag for tag in tags if tag.startswith(("deepspeed/", "Train/"))]
    assert not of_deepspeed, "the same numbers, which DeepSpeed would write within a step"
    assert dict(scalars["train/loss"]) == pytest.approx(losses(finished.dir), rel=1e-6)
    config = (finished.dir / "config.yaml").read_text()
    assert read_texts(folder)["run/config.yaml"] == [(1, f"```\n{config}```")]


def test_tensorboard_shows_that_gates_of_three_branches_start_balanced(stopped: Path) -> None:
    assert read_metrics(stopped)[0]["mfu"] is None, "the peak of a CPU is unknown"
    scalars = read_scalars(stopped / "tensorboard")
    assert [scalars[f"gates/{name}"][0][1] for name in ("cmp", "sel", "win")] == [0.5, 0.5, 0.5]


def test_fallbacks_of_every_operation_are_recorded(finished: FinishedRun) -> None:
    with (finished.dir / "fallbacks.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = {"add_rms_norm", "cross_entropy", "pool", "rotary_pool", "select_blocks"}
    expected |= {"selected_attention", "selector_loss", "swiglu"}
    assert {row["operation"] for row in rows} == expected
    assert all("needs a CUDA device" in row["reason"] and int(row["calls"]) > 0 for row in rows)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_run_leaves_nothing_in_shared_memory(finished: FinishedRun) -> None:
    """DeepSpeed's buffers are named after the port and would outlive every run."""
    assert not [path for path in Path("/dev/shm").iterdir() if str(finished.port) in path.name]


def test_a_run_from_anothers_files_repeats_it(finished: FinishedRun, tmp_path: Path) -> None:
    run = finished.dir
    files = [f"--config={run}/config.yaml", f"--deepspeed_config={run}/ds_config.json"]
    succeed(on_two_ranks("m7c.py", *files, "--run-dir=again", "--until=2", folder=tmp_path))
    expected = losses(run)
    assert losses(tmp_path / "again") == {step: expected[step] for step in (1, 2)}


@pytest.mark.skipif(not FP16_WORKS, reason="DeepSpeed does not support fp16 on this device")
def test_switching_the_precision_takes_one_setting(tmp_path: Path) -> None:
    arguments = ["--set=train.precision=fp16", ds_config("zero1_bf16acc"), "--steps=3"]
    succeed(on_two_ranks("m7c.py", *TINY, *arguments, "--run-dir=run", folder=tmp_path))
    assert set(losses(tmp_path / "run")) == {1, 2, 3}


@pytest.mark.parametrize("profile", ["production", "demo"])
def test_the_dense_twin_differs_in_nothing_but_its_attention(profile: str) -> None:
    sparse, dense = (load_profile(name, profile) for name in ("m7c", "m7c_dense"))
    assert resolve_config(dense) == resolve_config(sparse, None, ["attention.kind=dense"])


def test_a_dry_run_prints_a_summary_and_writes_and_sends_nothing(tmp_path: Path) -> None:
    """Not to W&B either; an existing folder stays as it is."""
    (run := tmp_path / "run").mkdir(mode=0o755)
    flags = ["--dry-run", "--run-dir=run", f"--deepspeed_config={write_config(tmp_path)}"]
    output = succeed(on_two_ranks("m7c.py", *TINY, *flags, folder=tmp_path))
    before, after = output.split("taking one step of 384 tokens …\n")
    for word in ("NO ACCELERATOR FOUND", "parameters", "learning_rate", "FLOPs per token"):
        assert word in before
    for line in ("# configuration (demo)", "# DeepSpeed", "tokens per step     384"):
        assert line in before.splitlines()
    assert "peak memory" in after
    loss = next(line for line in output.splitlines() if line.startswith("loss"))
    assert float(loss.split()[1]) == pytest.approx(math.log(320), rel=0.1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "run"]
    assert list(run.iterdir()) == []
    assert run.stat().st_mode & 0o777 == 0o755


def test_an_error_reaches_the_terminal_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []  # of other ranks than 0, whose error is the same
    monkeypatch.setattr(recipes, "end_process", sys.exit)
    monkeypatch.setattr(recipes, "signal", Mock())
    monkeypatch.setattr(recipes, "time", SimpleNamespace(sleep=waits.append))
    for rank, waited in (("0", []), ("1", [10])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            recipes._exit_with_error(Recipe("m7c", "", {}), ValueError("a\n\x1b[2Jb"), 2)
        assert capsys.readouterr().err == "m7c: a\n\\x1b[2Jb\n"
        assert waits == waited


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ([], {"teacher.csv"}),
        (["--set=monitor.csv=false", "--set=train.teacher=x"], {"metrics.csv"}),
        (["--set=monitor.health=false"], {"selection.csv", "teacher.csv"}),
    ],
)
def test_a_run_writes_the_tables_of_its_settings(flags: list[str], missing: set[str]) -> None:
    """On rank 0 alone."""
    request, engine = small_request(*flags), SimpleNamespace(monitor=Mock(enabled=False))
    assert build_observers(request, engine, None)._observers == []
    writer = BackgroundWriter("CSV files")
    observers = build_observers(request, engine, writer)
    writer.close()
    written = {x.file_name for x, _ in observers._observers if isinstance(x, CsvObserver)}
    assert written == {"metrics.csv", "selection.csv", "teacher.csv"} - missing


def test_a_mistake_costs_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for flags, end in (
        (["--set=train.stpes=3"], "there is no setting 'train.stpes'; did you mean train.steps?"),
        (["--step=3"], "--step=3 (did you mean --steps?)"),
        (["--run-dir=/proc/x", "--dry-run"], "(No such file or directory); choose another folder"),
    ):
        line = refused(on_one_rank("m7c.py", *flags, folder=tmp_path))
        assert line.startswith("m7c")
        assert line.endswith(end)
        assert list(tmp_path.iterdir()) == [], "refused before anything was created"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--deepspeed_config=nowhere.json"], ["nowhere.json"]),
        (["--resume"], ["--resume", "runs/small-demo"]),
        (["--run-dir=gone", "--resume"], ["gone", "--resume"]),
        (["--until=0"], ["--until", "0"]),
        (["--universal"], ["--universal: requires --resume; add it"]),
        (["--config=nowhere.yaml"], ["nowhere.yaml"]),
        pytest.param(
            ["--set=train.precision=fp16"],
            ["train.precision = 'fp16'", "set train.precision to bf16 or fp32"],
            marks=pytest.mark.skipif(FP16_WORKS, reason="this device computes in fp16"),
        ),
    ],
)
def test_a_wrong_flag_is_refused_by_name(
    flags: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r".") as refused:
        small_request(*flags)
    assert all(word in str(refused.value) for word in words), refused.value
    assert list(tmp_path.iterdir()) == []


def test_a_refused_resume_leaves_the_run_as_it_was(stopped: Path) -> None:
    before = {path: path.read_bytes() for path in stopped.rglob("*.[jy]*")}
    assert len(before) > 4
    resume = [f"--run-dir={stopped}", "--resume", "--until=1"]
    assert "already at step 1" in refused(on_one_rank("m7c.py", *resume, folder=stopped))
    assert {path: path.read_bytes() for path in stopped.rglob("*.[jy]*")} == before


def test_a_resumed_run_has_the_checkpoints_settings_logs_changes_and_moves_rows_of_other_columns(
    stopped: Path, tmp_path: Path
) -> None:
    """Not the settings of a file that is damaged or missing. The selector loss adds columns."""
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    earlier = (run / "selection.csv").read_text().splitlines()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text[: len(text) // 2])
    (run / "ds_config.json").unlink()
    changes = [ds_config("zero2_pcie"), "--set=attention.selector_loss=1"]
    result = on_one_rank("m7c.py", "--resume", "--run-dir=run", *changes, folder=tmp_path)
    output = succeed(result)
    assert "changed since step00000001: ZeRO stage: 1 -> 2" in output
    assert "changed since step00000001: model.attention.selector_loss: 0.0 -> 1.0" in output
    assert output.count("changed since") == 2
    before, after = (
        yaml.safe_load((folder / "config.yaml").read_text()) for folder in (stopped, run)
    )
    assert after["model"]["attention"].pop("selector_loss") == 1.0
    assert before["model"]["attention"].pop("selector_loss") == 0.0
    assert after == before
    assert json.loads((run / "ds_config.json").read_text())["zero_optimization"]["stage"] == 2
    train = before["train"]
    samples = 2 * train["micro_batch"] * train["accumulation"]  # of both steps
    assert f"the run consumes {samples} samples of " in output
    assert "moved to selection.1.csv" in result.stderr
    assert (run / "selection.1.csv").read_text().splitlines() == earlier
    header, *lines = (run / "selection.csv").read_text().splitlines()
    assert header == f"{earlier[0]},{','.join(SELECTOR_STATISTICS)}"
    cells = [line.rsplit(",", 3)[1:] for line in lines]
    assert cells == [["0", "", ""]] * 2, "96 tokens have no blocks to rank"
    assert list(losses(run)) == [1, 2]


def test_a_run_refused_while_it_was_built_leaves_no_folder(tmp_path: Path) -> None:
    arguments = [*TINY, "--steps=1", "--run-dir=run", "--set=attention.backend=triton"]
    arguments += ["--set=data.cache=null"]
    assert "triton" in refused(on_one_rank("m7c.py", *arguments, folder=tmp_path))
    assert os.listdir(tmp_path) == ["data-cache"]


def test_an_unreadable_file_at_the_start_is_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    (start := tmp_path / "start").mkdir()
    (start / "model.safetensors").touch()
    (start / "config.json").symlink_to("/proc/self/mem")  # its first byte is an I/O error
    settings = (*TINY, "--run-dir=run", f"--set=train.start_from={start}")
    assert refused(on_one_rank("m7c.py", *settings, folder=tmp_path)) == (
        f"m7c: {start / 'config.json'}: Input/output error; check the disk, or use another file"
    )
    assert os.listdir(tmp_path) == ["start"]


INDEXED = ["attention.branches=sel", "attention.compressor=pool", "attention.selector_loss=1"]
DENSE_FIRST = "attention is dense in the first 4 of 50,000 steps"


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (["train.steps=100", "train.warmup_steps=99"], None),
        (
            ["train.steps=100", "train.warmup_steps=100"],
            "train.warmup_steps = 100: not below train.steps = 100, so the learning rate never "
            "decays; lower train.warmup_steps",
        ),
        (
            ["train.steps=10000"],
            "train.warmup_steps = 400, scaled with train.steps: 2,000 of 50,000",
        ),
        (
            [*INDEXED, "train.dense_steps=4"],
            f"{DENSE_FIRST} (train.dense_steps); nothing is selected in them, so selection.csv "
            "begins after them",
        ),
        (
            [*INDEXED, "train.selector_steps=4"],
            f"{DENSE_FIRST}, in which only the index learns (train.selector_steps)",
        ),
        (
            ["monitor.csv=false"],
            "monitor.csv = false: without metrics.csv no gate judges the loss or the speed, and "
            "the watchdog notices no collapse of the speed",
        ),
    ],
)
def test_what_may_surprise_in_a_run_is_noted(settings: list[str], note: str | None) -> None:
    request = small_request(*(f"--set={setting}" for setting in settings))
    assert request.notes == ([] if note is None else [note])


def test_a_step_beyond_the_end_is_noted() -> None:
    request = small_request("--steps=2", "--until=3")
    assert request.stop_step == 2
    assert "--until 3: the run ends earlier, at step 2" in request.notes


def test_a_run_that_cannot_begin_dense_as_its_recipe_does_is_noted() -> None:
    def dense_first() -> RunConfig:
        config = small()
        config.train.dense_steps = AUTO
        return config

    flags = "--set=train.steps=99", "--set=train.warmup_steps=9"
    assert small_request(*flags, profile=dense_first).notes == [
        "attention is sparse from the first step: train.dense_steps=auto needs an index, new "
        "weights and 100 steps; this run has 99"
    ]
