"""The recipe as users start it: `deepspeed --num_gpus 2 recipes/m7c.py`, on two real ranks."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from deepspeed.accelerator import get_accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from nsa.monitor.metrics_csv import COLUMNS, read_metrics
from tests.engine.runs import TINY, alone, deepspeed, launched, losses, succeed
from tests.ranks import ROOT, free_port

FP16_WORKS = torch.float16 in get_accelerator().supported_dtypes()
NO_FP16 = "DeepSpeed does not support fp16 on this device"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process that has taken one of its two steps."""
    folder = tmp_path_factory.mktemp("started")
    succeed(alone("m7c.py", *TINY, "--steps=2", "--until=1", "--run-dir=run", folder=folder))
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 8 steps that nothing interrupted, with documents kept apart."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = ["--steps", "8", "--set", "data.packing=documents", "--set", "train.accumulation=2"]
    return folder, succeed(launched("m7c.py", *TINY, *arguments, folder=folder))


def test_without_an_accelerator_the_demo_runs_and_says_so(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert "NO ACCELERATOR FOUND" in output
    env = json.loads((folder / "runs/m7c-demo/env.json").read_text())
    assert env["profile"] == "demo"
    assert "NO ACCELERATOR FOUND" in env["notes"][0]


def test_metrics_have_a_row_for_each_step_and_the_values_are_whole(
    finished: tuple[Path, str],
) -> None:
    path = finished[0] / "runs/m7c-demo/metrics.csv"
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["tokens"] for row in rows] == [step * 96 * 2 * 2 * 2 for step in range(1, 9)]
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [4, 8]
    last = rows[-1]
    assert last["bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2), rel=1e-3)
    assert rows[0]["loss"] == pytest.approx(math.log(320), rel=0.1)
    assert last["loss"] < rows[0]["loss"]
    assert all(row["mfu"] is None for row in rows), "a processor's peak is unknown: no guess"
    assert all(row["grad_norm"] > 0 and row["memory_gb"] > 0 for row in rows)


def test_tensorboard_holds_the_scalars_and_deepspeeds_own(finished: tuple[Path, str]) -> None:
    folder = finished[0] / "runs/m7c-demo"
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/lr", "train/grad_norm", "train/skipped_steps"} <= tags
    assert {"eval/loss", "eval/bits_per_byte", "speed/tokens_per_s", "memory/gb"} <= tags
    assert {"gates/cmp", "gates/sel", "gates/win", "deepspeed/lr"} <= tags
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    expected = losses(folder)
    assert written == pytest.approx(expected, rel=1e-6)
    assert [event.step for event in events.Scalars("deepspeed/lr")] == list(range(1, 9))
    (shown,) = events.Tensors("run/config.yaml/text_summary")
    settings = (folder / "config.yaml").read_text()
    assert shown.tensor_proto.string_val[0].decode() == f"```\n{settings}```"
    row = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(row).session_start_info.hparams
    assert settings["run.ranks"].number_value == 2
    assert settings["deepspeed.stage"].number_value == 1
    assert settings["model.attention.kind"].string_value == "nsa"
    first_gates = [events.Scalars(f"gates/{name}")[0].value for name in ("cmp", "sel", "win")]
    assert first_gates == [0.5, 0.5, 0.5], "gates start balanced"


def test_the_backends_that_were_passed_over_are_written_down(finished: tuple[Path, str]) -> None:
    with (finished[0] / "runs/m7c-demo/fallbacks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["operation"] for row in rows} == {
        "compressed_attention",
        "select_blocks",
        "selected_attention",
        "window_attention",
    }
    assert all("needs a CUDA device" in row["reason"] and int(row["calls"]) > 0 for row in rows)


def test_a_run_can_be_started_from_what_another_wrote(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder = finished[0] / "runs/m7c-demo"
    succeed(
        deepspeed(
            "m7c.py",
            f"--config={folder / 'config.yaml'}",
            f"--deepspeed_config={folder / 'ds_config.json'}",
            "--run-dir=again",
            "--until=4",
            folder=tmp_path,
        )
    )
    again, first = losses(tmp_path / "again"), losses(folder)
    assert again == {step: first[step] for step in range(1, 5)}


@pytest.mark.parametrize("config", ["zero1_pcie", "zero2_overlap"])
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(config: str, tmp_path: Path) -> None:
    source = f"--deepspeed_config={ROOT / 'ds_configs' / config}.json"
    succeed(deepspeed("m7c.py", *TINY, source, "--steps=6", "--run-dir=whole", folder=tmp_path))
    succeed(
        deepspeed(
            "m7c.py", *TINY, source, "--steps=6", "--until=3", "--run-dir=parts", folder=tmp_path
        )
    )
    assert set(losses(tmp_path / "parts")) == {1, 2, 3}
    # Neither values nor the JSON are named again: a run goes on as it began.
    succeed(deepspeed("m7c.py", "--run-dir=parts", "--resume", folder=tmp_path))
    whole = read_metrics(tmp_path / "whole/metrics.csv")
    parts = read_metrics(tmp_path / "parts/metrics.csv")
    for column in ("step", "tokens", "loss", "val_loss", "lr", "grad_norm"):
        # The parts end at step 3 once, so a validation loss stands there too.
        left, right = ([row[column] for row in rows] for rows in (whole, parts))
        if column == "val_loss":
            left, right = left[3:], right[3:]
        assert left == right, column
    stage = json.loads((tmp_path / "parts/ds_config.json").read_text())["zero_optimization"]
    assert stage["stage"] == int(config[4])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_run_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    """DeepSpeed's buffers carry the port's number and would outlive every run."""
    port = free_port()
    succeed(deepspeed("m7c.py", *TINY, "--steps", "1", folder=tmp_path, port=port))
    assert [path.name for path in Path("/dev/shm").iterdir() if str(port) in path.name] == []


@pytest.mark.parametrize(
    "config",
    ["zero1_pcie", "zero1_bf16acc", "zero2_pcie", "zero2_overlap", "zero0_debug", "zero3"],
)
def test_switching_the_deepspeed_config_is_one_flag(config: str, tmp_path: Path) -> None:
    source = f"--deepspeed_config={ROOT / 'ds_configs' / config}.json"
    succeed(deepspeed("m7c.py", *TINY, source, "--steps=3", "--run-dir=run", folder=tmp_path))
    found = losses(tmp_path / "run")
    assert set(found) == {1, 2, 3}
    # The first loss is before any optimizer: the same for all, to the last bit.
    assert found[1] == pytest.approx(5.8, abs=0.4)
    assert found[3] < found[1]
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step00000003"


FP16 = pytest.param("fp16", marks=[] if FP16_WORKS else pytest.mark.skip(reason=NO_FP16))


@pytest.mark.parametrize("precision", ["fp32", FP16])
def test_other_precisions_are_reached_by_one_setting(precision: str, tmp_path: Path) -> None:
    result = deepspeed(
        "m7c.py",
        *TINY,
        f"--set=train.precision={precision}",
        f"--deepspeed_config={ROOT / 'ds_configs/zero1_bf16acc.json'}",
        "--steps=3",
        "--run-dir=run",
        folder=tmp_path,
    )
    succeed(result)
    assert set(losses(tmp_path / "run")) == {1, 2, 3}


@pytest.mark.skipif(FP16_WORKS, reason="this device computes in fp16")
def test_a_precision_that_the_device_lacks_is_refused_with_the_mend(tmp_path: Path) -> None:
    result = alone("m7c.py", "--set=train.precision=fp16", folder=tmp_path)
    assert result.returncode == 2
    assert "train.precision = 'fp16'" in result.stderr
    assert "set train.precision to bf16 or fp32" in result.stderr


def test_the_dense_twin_differs_in_nothing_but_its_attention(tmp_path: Path) -> None:
    for recipe in ("m7c.py", "m7c_dense.py"):
        run_dir = f"--run-dir={recipe}"
        succeed(alone(recipe, *TINY, "--steps=2", run_dir, folder=tmp_path))
    sparse, dense = (
        yaml.safe_load((tmp_path / recipe / "config.yaml").read_text())
        for recipe in ("m7c.py", "m7c_dense.py")
    )
    assert sparse["model"]["attention"].pop("kind") == "nsa"
    assert dense["model"]["attention"].pop("kind") == "dense"
    assert sparse == dense


def test_a_dry_run_says_what_the_run_would_be_and_writes_nothing(tmp_path: Path) -> None:
    output = succeed(deepspeed("m7c.py", *TINY, "--dry-run", folder=tmp_path))
    for words in ("parameters", "peak memory", "learning_rate", "zero_optimization", "FLOPs"):
        assert words in output
    loss = next(line for line in output.splitlines() if line.startswith("loss"))
    assert float(loss.split()[1]) == pytest.approx(math.log(320), rel=0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "train.stpes=3"], ["train.stpes", "steps"]),
        (["--deepspeed_config", "nowhere.json"], ["nowhere.json"]),
        (["--resume"], ["--resume", "runs/m7c-demo"]),
        (["--run-dir", "gone", "--resume"], ["gone", "--resume"]),
        (["--until", "0"], ["--until", "0"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
)
def test_a_mistake_costs_one_line_and_exit_code_2(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    result = alone("m7c.py", *arguments, folder=tmp_path)
    assert result.returncode == 2
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("m7c: ")
    assert all(word in line for word in words), line
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == [], "nothing expensive had started"


def test_a_misspelt_flag_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    result = alone("m7c.py", "--setps=3", folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr.endswith("--setps=3 (did you mean --steps?)\n")


def test_a_run_never_writes_into_the_folder_of_another(tmp_path: Path) -> None:
    short = [*TINY, "--steps=1"]
    succeed(alone("m7c.py", *short, folder=tmp_path))
    succeed(alone("m7c.py", *short, folder=tmp_path))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "m7c-demo",
        "m7c-demo-2",
    ]
    result = alone("m7c.py", *short, "--run-dir=runs/m7c-demo", folder=tmp_path)
    assert result.returncode == 2
    assert "already holds a run" in result.stderr
    (tmp_path / "file").touch()
    result = alone("m7c.py", *short, "--run-dir=file", folder=tmp_path)
    assert result.returncode == 2
    assert "--run-dir file: is a file; name a folder" in result.stderr


@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_a_folder_of_imported_weights_is_no_run_to_go_on_with(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("config.yaml", "model.safetensors"):
        (tmp_path / name).touch()
    result = alone("m7c.py", *TINY, "--run-dir=.", *flags, folder=tmp_path)
    assert result.returncode == 2
    assert "holds model weights, not a run" in result.stderr
    assert "--set train.start_from=. in another folder" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set=model.layers=3"], ["model.layers = 3", "created with 2"]),
        ([f"--deepspeed_config={ROOT / 'ds_configs/zero3.json'}"], ["ZeRO stage 1 or 2"]),
        (["--until=1"], ["already at step 1", "--until"]),
    ],
)
def test_a_refused_resume_leaves_the_run_as_it_was(
    started: Path, arguments: list[str], words: list[str]
) -> None:
    before = {path: path.read_bytes() for path in started.rglob("*.[jy]*")}
    assert len(before) > 4
    result = alone("m7c.py", f"--run-dir={started}", "--resume", *arguments, folder=started)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert {path: path.read_bytes() for path in started.rglob("*.[jy]*")} == before


def test_resuming_on_another_number_of_ranks_says_how_many_it_takes(started: Path) -> None:
    result = deepspeed("m7c.py", f"--run-dir={started}", "--resume", folder=started)
    assert result.returncode == 2
    assert "saved with ranks 1" in result.stderr
    assert "start 1 ranks" in result.stderr


def test_a_run_that_was_refused_while_it_was_built_does_not_block_the_next(
    tmp_path: Path,
) -> None:
    short = [*TINY, "--steps=1", "--run-dir=run"]
    result = alone("m7c.py", *short, "--set=attention.backend=triton", folder=tmp_path)
    assert result.returncode == 2
    assert "triton" in result.stderr
    succeed(alone("m7c.py", *short, folder=tmp_path))


def test_a_checkpoint_of_another_precision_is_refused_with_the_mend(started: Path) -> None:
    source = f"--deepspeed_config={ROOT / 'ds_configs/zero1_bf16acc.json'}"
    arguments = [f"--run-dir={started}", "--resume", source, "--set=train.precision=fp32"]
    result = alone("m7c.py", *arguments, folder=started)
    assert result.returncode == 2
    assert "train.precision=bf16" in result.stderr
