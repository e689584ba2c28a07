"""A run's data: resumption, refusals before anything is built, and errors that end all ranks."""

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest

from nsa.checkpoint.commit import new_draft
from nsa.data.cache import TokenCache, cache_folder
from nsa.data.shards import Index, write_index
from nsa.data.source import is_validation
from nsa.engine.data import open_data
from nsa.engine.process_group import Ranks
from nsa.engine.run_request import RunRequest, TrainState
from tests.data.processes import workers_of
from tests.data.test_shards import STAMP
from tests.engine.runs import (
    TINY,
    Finished,
    cut_back,
    losses,
    on_one_rank,
    on_two_ranks,
    read_metrics,
    refused,
    succeed,
)
from tests.engine.small import small, small_request
from tests.faults import harness
from tests.ranks import free_port


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 1,000 unique short documents."""
    path = tmp_path_factory.mktemp("text") / "books.jsonl"
    lines = (f"line {number} of the text: {number * 7919 % 10_007}" for number in range(1_000))
    path.write_text("".join(json.dumps({"text": line * 3}) + "\n" for line in lines))
    return path


def test_a_resumed_run_repeats_the_uninterrupted_one_exactly_from_the_cache_of_both(
    books: Path, tmp_path: Path
) -> None:
    """Of a source that grows, with twice 16 MiB of text in few documents."""
    large = tmp_path / "large.jsonl"
    large.write_text(f"{books.read_text()}" + json.dumps({"text": "long " * 7_000_000}) + "\n")
    source = [*TINY[:-1], f"--set=data.source={large}", "--steps=6"]
    output = succeed(on_one_rank("m7c.py", *source, "--run-dir=uninterrupted", folder=tmp_path))
    assert "shuffled in blocks" in output
    assert re.search(r"first batch ready \d+\.\d s after opening the dataset", output)
    resumed = cut_back(tmp_path / "uninterrupted", 3, tmp_path / "resumed")
    assert list(losses(resumed)) == [1, 2, 3]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "data-cache").rglob("*")}
    draft = new_draft(resumed / "checkpoints", 9)  # of a save that was killed
    succeed(on_one_rank("m7c.py", "--run-dir=resumed", "--resume", folder=tmp_path))
    assert not draft.exists()
    assert losses(resumed) == losses(tmp_path / "uninterrupted")
    validation = [
        [row["val_loss"] for row in read_metrics(tmp_path / name)][3:]
        for name in ("uninterrupted", "resumed")
    ]
    assert validation[0] == validation[1]
    assert {path: path.stat().st_mtime_ns for path in written} == written, "one cache"


def test_samples_continue_on_resume_and_start_again_with_other_data_unless_that_is_a_changed_file(
    books: Path, tmp_path: Path
) -> None:
    (text := tmp_path / "text.jsonl").write_text(books.read_text())

    def train(*flags: str) -> Finished:
        return on_one_rank("m7c.py", "--run-dir=run", *flags, folder=tmp_path)

    def state(step: int) -> dict[str, int]:
        file = tmp_path / f"run/checkpoints/step{step:08d}/state.json"
        return json.loads(file.read_text())["state"]

    settings = [f"--set={x}" for x in (f"data.source={text}", "train.micro_batch=1")]
    settings += ["--set=model.vocab_size=259"]  # just enough for bytes
    succeed(train(*TINY, *settings, "--steps=6", "--until=2"))
    succeed(train("--resume", "--set=train.accumulation=3", "--until=4"))
    assert (state(4)["samples"], state(4)["tokens"]) == (2 * 1 + 2 * 3, 96 * (2 * 1 + 2 * 3))
    text.write_text(books.read_text().replace("line", "row"))
    assert "its content changed since the run started" in refused(train("--resume"))
    output = succeed(train("--resume", "--set=data.source=synthetic"))
    assert "the new data starts at its first sample" in output
    assert state(6)["samples"] == 2 * 3


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[list[str]]:
    """The settings of a run on a pipe that hangs after 97 samples for training, and some held out.

    The run consumes 64 of them in 8 steps: the next block has 64 more.
    """
    texts = [f"{number} " + "x" * 33_000 for number in range(200)]
    held_out = [is_validation(text.encode(), 0.05) for text in texts]
    order = [held_out.index(True), *(n for n, held in enumerate(held_out) if not held)][:4]
    lines = "".join(json.dumps({"text": texts[number]}) + "\n" for number in order)
    os.mkfifo(tmp_path / "slow.jsonl")
    pipe = os.open(tmp_path / "slow.jsonl", os.O_RDWR)
    Thread(target=lambda: os.write(pipe, lines.encode()), daemon=True).start()  # waits for readers
    settings = (f"data.source={tmp_path}/slow.jsonl", "data.seq_len=1024", "train.eval_samples=1")
    quick = ("train.eval_every=0", "attention.branches=win", "model.layers=1", "model.width=16")
    quick += ("model.heads=1", "model.mlp_width=16", "model.activation_checkpointing=none")
    quick += ("attention.spec.window=8", "train.micro_batch=8", "data.timeout=10")
    yield [f"--set={setting}" for setting in (*settings, *quick)]
    os.close(pipe)


def test_a_hanging_source_ends_a_run_after_a_save(hanging: list[str], tmp_path: Path) -> None:
    arguments = [*TINY, *hanging, "--steps=1000", "--run-dir=run"]
    result = on_one_rank("m7c.py", *arguments, folder=tmp_path)
    assert result.returncode != 0
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("m7c: "))
    words = ("slow.jsonl", "data.timeout", "10 seconds", "slow.jsonl:4", "nsa data prepare")
    assert all(word in error for word in words), error
    last = max(losses(tmp_path / "run"))
    assert last >= 3
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step{last:08d}"


def test_a_killed_writer_crashes_a_run_after_a_save(hanging: list[str], tmp_path: Path) -> None:
    """`nsa watch --restart` restarts after exit code 1, not after 2."""
    run = harness.start(tmp_path, *hanging, "--steps=1000", ranks=0)
    run.wait_for_step(2)
    (writer,) = (worker for pid in run.ranks.pids for worker in workers_of(pid))
    os.kill(writer, signal.SIGKILL)
    run.end()
    assert run.codes == [1], run.output[-2_000:]
    (error,) = (line for line in run.ranks.text("err").splitlines() if line.startswith("m7c: "))
    assert "its worker was ended by signal 9 (SIGKILL), possibly out of memory" in error
    assert "data.timeout" not in error, "another writer was started instead"
    saved = run.dir / f"checkpoints/step{run.last_step:08d}"
    assert saved.is_dir()


def test_one_rank_and_two_evaluate_the_same_samples(tmp_path: Path) -> None:
    """The untrained model is the same, so the loss shows which samples were read."""
    validation_losses = []
    for start, micro_batch in ((on_one_rank, 3), (on_two_ranks, 2)):
        settings = [f"--set=train.micro_batch={micro_batch}", "--set=train.eval_samples=7"]
        settings += ["--set=train.learning_rate=1e-12", "--set=train.min_learning_rate=0"]
        run_dir = f"run{micro_batch}"
        arguments = [*TINY, *settings, "--steps=1", f"--run-dir={run_dir}"]
        succeed(start("m7c.py", *arguments, folder=tmp_path))
        validation_losses.append(read_metrics(tmp_path / run_dir)[-1]["val_loss"])
    assert validation_losses[0] == pytest.approx(validation_losses[1], rel=1e-3)
    assert validation_losses[0] == pytest.approx(5.8, abs=0.4)


def test_a_dry_run_without_the_hub_reports_unchecked_data(tmp_path: Path) -> None:
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": str(tmp_path / "hf")}
    flags = [*TINY, "--set=data.tokenizer=hf:gpt2", "--dry-run"]
    output = succeed(on_one_rank("m7c.py", *flags, folder=tmp_path, environment=hub))
    assert "DATA NOT REACHED, and not checked: data.tokenizer = 'hf:gpt2'" in output


def request(run_dir: Path, *settings: str, resume: bool = False) -> RunRequest:
    """Request a run with a model of 8-token selection blocks, 4 per query."""
    flags = [f"--set={setting}" for setting in settings] + ["--resume"] * resume
    return small_request(f"--run-dir={run_dir}", *flags)


def write_settings(run_dir: Path, started: RunRequest) -> None:
    run_dir.mkdir()
    for name, text in started.config_files().items():
        (run_dir / name).write_text(text)


def test_a_new_run_stores_local_data_as_an_absolute_path(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(books.parent)
    (books.parent / "embedded").mkdir()  # is no source
    mixture = request(tmp_path / "mixed", "data.source={./books.jsonl: 1, embedded: 2, hf:a/b: 3}")
    assert mixture.config.data.source == {str(books): 1, "embedded": 2, "hf:a/b": 3}
    (books.parent / "embedded").rmdir()
    started = request(tmp_path / "run", "data.source=books.jsonl", "data.cache=cache")
    assert started.config.data.source == str(books)
    assert cache_folder(started.config.data, tmp_path / "run") == books.parent / "cache"
    write_settings(tmp_path / "run", started)
    monkeypatch.chdir(tmp_path)
    assert request(tmp_path / "run", resume=True).config == started.config
    monkeypatch.chdir(books.parent)
    again = request(tmp_path / "run", "data.source=books.jsonl", resume=True)
    assert (again.config, again.data_changed) == (started.config, False)


def test_an_older_run_with_a_relative_path_resumes_from_its_folder(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = request(tmp_path / "run", "data.source=embedded")
    started.config.data.source = "books.jsonl"
    write_settings(tmp_path / "run", started)
    monkeypatch.chdir(books.parent)
    for settings in ([], [f"data.source={books}"]):
        resumed = request(tmp_path / "run", *settings, resume=True)
        assert resumed.config.data.source == "books.jsonl", "stream cursors are stored under it"
        assert not resumed.data_changed
    assert request(tmp_path / "run", "data.source=embedded", resume=True).data_changed


def test_a_sequence_so_short_that_selection_leaves_no_block_out_is_noted(tmp_path: Path) -> None:
    def short(*settings: str) -> list[str]:
        return [note for note in request(tmp_path, *settings).notes if "select_top" in note]

    assert short("data.seq_len=33") == []
    (note,) = short("data.seq_len=32")
    assert note == (
        "data.seq_len = 32: has 4 selection blocks and model.attention.spec.select_top = 4, so "
        "every query selects all of its blocks; set data.seq_len above 32, or lower select_top"
    )
    assert short("data.seq_len=32", "attention.kind=dense") == []
    assert short("data.seq_len=32", "attention.branches=cmp+win") == []


def test_a_vocabulary_too_small_for_the_tokens_is_refused(books: Path, tmp_path: Path) -> None:
    config = small()
    config.data.source, config.model.vocab_size = str(books), 258
    with pytest.raises(ValueError, match=r"size = 258: too small .*; set model\.vocab_size to 259"):
        open_data(config, Ranks(0, 0, 1), TrainState(), tmp_path)


def test_a_start_tokenises_what_the_run_reads_and_a_refused_one_leaves_no_process(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small()
    config.data.source, config.data.seq_len = str(books), 8
    started, closed, state = Mock(), Mock(), TrainState(step=3, samples=5, data="other")
    monkeypatch.setattr(TokenCache, "start", started)
    monkeypatch.setattr(TokenCache, "close", closed)
    with pytest.raises(ValueError, match="its content changed since the run started"):
        open_data(config, Ranks(0, 0, 2), state, tmp_path / "run")
    samples = 5 + (config.train.steps - 3) * 2 * config.train.rows * config.train.accumulation
    started.assert_called_once_with({"train": samples, "val": config.train.eval_samples})
    closed.assert_called_once_with()


@pytest.mark.parametrize(
    ("flags", "vocabulary"),
    [
        ([], 448),
        (["--set=model.vocab_size=640"], 640),
        (["--config=sizes.yaml"], 512),
        (["--set=train.start_from=other"], 272),  # whose weights have one
    ],
)
def test_prepared_data_determines_the_vocabulary_unless_the_user_does(
    flags: list[str], vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sizes.yaml").write_text("model: {vocab_size: 512}\n")
    write_index(Path(), Index(replace(STAMP, vocab_size=400, eos_id=399), {}, []))
    request = small_request("--set=data.source=.", *flags)
    assert request.config.model.vocab_size == vocabulary
    assert f"vocab_size: {vocabulary}\n" in request.config_files()["config.yaml"]
    notes = [note for note in request.notes if "vocab_size" in note]
    assert [note.split(":")[0] for note in notes] == (
        [] if flags else ["model.vocab_size = 448 instead of 272"]
    )
