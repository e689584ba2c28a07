"""A run's text, seen from the run: where it goes on, what is refused, and what ends all ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from nsa.monitor.metrics_csv import read_metrics
from tests.engine.runs import TINY, alone, deepspeed, losses, succeed
from tests.ranks import free_port


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 600 short documents, no two alike."""
    path = tmp_path_factory.mktemp("text") / "books.jsonl"
    lines = (f"line {number} of the text: {number * 7919 % 10_007}" for number in range(600))
    path.write_text("".join(json.dumps({"text": line * 3}) + "\n" for line in lines))
    return path


def test_a_streamed_run_that_is_resumed_repeats_the_uninterrupted_one_exactly(
    books: Path, tmp_path: Path
) -> None:
    source = [*TINY, f"--set=data.source={books}", "--set=data.shuffle_documents=40"]
    source += ["--set=data.workers=2", "--steps=6"]
    output = succeed(deepspeed("m7c.py", *source, "--run-dir=whole", folder=tmp_path))
    assert re.search(r"first batch ready \d+\.\d s after opening the dataset", output)
    succeed(deepspeed("m7c.py", *source, "--until=3", "--run-dir=parts", folder=tmp_path))
    saved = tmp_path / "parts/checkpoints/step00000003"
    assert sorted(path.name for path in saved.glob("rank*.json")) == ["rank0.json", "rank1.json"]
    succeed(deepspeed("m7c.py", "--run-dir=parts", "--resume", folder=tmp_path))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    held_out = [
        [row["val_loss"] for row in read_metrics(tmp_path / name / "metrics.csv")][3:]
        for name in ("whole", "parts")
    ]
    assert held_out[0] == held_out[1]


def test_samples_go_on_where_a_resumed_run_divides_its_steps_otherwise(tmp_path: Path) -> None:
    """Of a tiny corpus each sample is read once an epoch, whatever the steps were divided into."""
    begin = [*TINY, "--set=train.micro_batch=1", "--steps=4"]
    succeed(alone("m7c.py", *begin, "--until=2", "--run-dir=run", folder=tmp_path))
    change = "--set=train.accumulation=3"
    succeed(alone("m7c.py", "--run-dir=run", "--resume", change, folder=tmp_path))
    saved = json.loads((tmp_path / "run/checkpoints/step00000004/state.json").read_text())
    assert saved["state"]["samples"] == 2 * 1 + 2 * 3
    assert saved["state"]["tokens"] == 96 * (2 * 1 + 2 * 3)


def test_other_text_on_resume_is_begun_at_its_start_and_said(tmp_path: Path) -> None:
    succeed(alone("m7c.py", *TINY, "--steps=3", "--until=1", "--run-dir=run", folder=tmp_path))
    again = ["--run-dir=run", "--resume", "--set=data.source=synthetic"]
    output = succeed(alone("m7c.py", *again, folder=tmp_path))
    assert "the new text begins at its first sample" in output
    saved = json.loads((tmp_path / "run/checkpoints/step00000003/state.json").read_text())
    assert saved["state"]["samples"] == 2 * 2


def test_text_that_changed_under_a_run_is_refused_on_resume(books: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(books.read_text())
    source = f"--set=data.source={text}"
    begin = [*TINY, source, "--steps=3", "--until=1", "--run-dir=run"]
    succeed(alone("m7c.py", *begin, folder=tmp_path))
    text.write_text(books.read_text().replace("line", "row"))
    result = alone("m7c.py", "--run-dir=run", "--resume", folder=tmp_path)
    assert result.returncode == 2
    assert "its content changed since the run started" in result.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.source=embeded", ["embeded", "embedded"]),
        ("data.source=nowhere.jsonl", ["nowhere.jsonl"]),
        ("data.tokenizer=hf:nowhere/at-all", ["nowhere/at-all"]),
        ("model.vocab_size=100", ["model.vocab_size = 100", "set model.vocab_size to 259"]),
    ],
)
def test_text_that_cannot_be_had_is_refused_before_anything_is_built(
    setting: str, words: list[str], tmp_path: Path
) -> None:
    result = alone("m7c.py", *TINY, f"--set={setting}", folder=tmp_path)
    assert result.returncode == 2
    line = result.stderr.strip().splitlines()[-1]
    assert all(word in line for word in words), line
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_loader_that_gives_nothing_more_ends_every_rank_with_one_message_and_a_checkpoint(
    books: Path, tmp_path: Path
) -> None:
    """Of two files, one for each rank, the second is a pipe into which no more is written."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text(books.read_text())
    os.mkfifo(folder / "b.jsonl")
    pipe = os.open(folder / "b.jsonl", os.O_RDWR)
    os.write(pipe, b"".join(books.read_bytes().splitlines(keepends=True)[:60]))
    try:
        source = [f"--set=data.source={folder}", "--set=data.timeout=6"]
        source += ["--set=data.shuffle_documents=20", "--set=train.eval_every=0"]
        result = deepspeed("m7c.py", *TINY, *source, "--run-dir=run", folder=tmp_path)
    finally:
        os.close(pipe)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("m7c: ")]
    assert said, result.stderr[-2_000:]
    words = ("rank 1", "b.jsonl", "data.timeout", "6 seconds", "nsa data prepare")
    assert all(word in said[0] for word in words), said
    last = max(losses(tmp_path / "run"))
    assert last >= 3
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step{last:08d}"


def test_a_stream_without_held_out_text_loses_no_step(books: Path, tmp_path: Path) -> None:
    source = [f"--set=data.source={books}", "--set=data.held_out=1e-9"]
    result = alone("m7c.py", *TINY, *source, "--run-dir=run", folder=tmp_path)
    assert result.returncode == 2
    assert "raise data.held_out" in result.stderr
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step00000004"


def test_what_is_wrong_with_the_first_documents_leaves_no_run_behind(
    books: Path, tmp_path: Path
) -> None:
    source = [f"--set=data.source={books}", "--set=data.text_field=body"]
    result = alone("m7c.py", *TINY, *source, folder=tmp_path)
    assert result.returncode == 2
    assert "no field 'body', but 'text'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_same_samples_are_held_out_on_one_rank_and_on_two(tmp_path: Path) -> None:
    """Before the first step the model is the same, so the loss tells which samples were read."""
    found = []
    for start, micro_batch in ((alone, 3), (deepspeed, 2)):
        settings = [f"--set=train.micro_batch={micro_batch}", "--set=train.eval_samples=7"]
        settings += ["--set=train.learning_rate=1e-12", "--set=train.min_learning_rate=0"]
        run_dir = f"run{micro_batch}"
        start_at = [*TINY, *settings, "--steps=1", f"--run-dir={run_dir}"]
        succeed(start("m7c.py", *start_at, folder=tmp_path))
        found.append(read_metrics(tmp_path / run_dir / "metrics.csv")[-1]["val_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] == pytest.approx(5.8, abs=0.4)


def without_hub(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A recipe where the hub's address is a port that nobody listens on, and no cache holds it."""
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": str(folder / "hf")}
    return alone("m7c.py", *TINY, *arguments, folder=folder, environment=environment)


def test_without_the_hub_production_data_is_refused_in_seconds_with_three_mends(
    tmp_path: Path,
) -> None:
    start = time.monotonic()
    result = without_hub("--set=data.source=fineweb_edu", folder=tmp_path)
    assert time.monotonic() - start < 30
    assert result.returncode == 2
    line = result.stderr.strip().splitlines()[-1]
    for fix in ("nsa data prepare", "--set data.source=embedded", "HF_HOME"):
        assert fix in line
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_without_the_hub_says_that_its_text_was_not_checked(tmp_path: Path) -> None:
    result = without_hub("--set=data.tokenizer=hf:gpt2", "--dry-run", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "DATA NOT REACHED, and not checked: data.tokenizer = 'hf:gpt2'" in result.stdout
