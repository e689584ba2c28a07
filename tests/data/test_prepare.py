"""`nsa data prepare` and its writer: every document once, whatever interrupts it."""

import json
import os
import re
import signal
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from nsa.cli import main
from nsa.data.builtin import synthetic
from nsa.data.config import DataConfig
from nsa.data.dataset import DividedSource
from nsa.data.files import open_files
from nsa.data.shards import INDEX, find_index, open_shards, read_index, verify_shards, write_index
from nsa.data.source import SPLITS, DataError, HeldOut, is_validation
from nsa.data.tokenizer import ByteTokenizer
from nsa.data.writer import (
    DOCUMENTS_PER_CALL,
    LOCK,
    Job,
    WorkerDied,
    Writer,
    lock,
    next_documents,
    plan_of,
    prepare,
)
from tests.data.odd_sources import Fails, Unreached
from tests.data.processes import wait_for_end, workers_of
from tests.data.texts import HELD_OUT, documents_of, train_tokenizer, write_lines
from tests.disks import flip_a_bit, mount, mounted
from tests.fork_server import Forked
from tests.ranks import ROOT, spawn_ranks, wait_for


def generated(size: int) -> list[bytes]:
    return [document.text for document in synthetic(size).read_all()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three JSON lines files with 600 KB of text, which takes a moment to prepare."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = generated(600_000)
    for number in range(3):
        write_lines(folder / f"{number}.jsonl", texts[number::3])
    return folder


@pytest.fixture(scope="module")
def config(corpus: Path) -> DataConfig:
    """The settings with which `start` prepares the corpus."""
    return DataConfig(source=str(corpus), held_out=HELD_OUT)


@pytest.fixture(scope="module")
def uninterrupted(config: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The content of a folder that was prepared without interruption."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    prepare(config, out, shard_tokens=10_000)
    return contents(out)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != LOCK}


def start(source: object, out: Path) -> Forked:
    """Start `nsa data prepare`, in a process group of its own."""
    flags = ["--source", str(source), "--tokenizer", "byte", "--out", str(out)]
    flags += ["--held-out", str(HELD_OUT), "--shard-tokens", "10000"]
    arguments = ("data", "prepare", *flags)
    return spawn_ranks(ROOT / "nsa/__main__.py", *arguments, ranks=0).started[0]


def wait_for_shards(process: Forked, out: Path, count: int) -> None:
    """Until there are `count` shards, while the process runs."""

    def has_shards() -> bool:
        assert process.wait(0) is None, process.text("err")
        return len(list(out.glob("*.bin"))) >= count

    wait_for(has_shards)


def texts_of(out: Path, split: str) -> list[bytes]:
    return documents_of(open_shards(str(out), split))


def test_every_document_is_in_one_split_once(config: DataConfig, tmp_path: Path) -> None:
    texts = generated(600_000)
    index = prepare(config, tmp_path, shard_tokens=30_000)
    verify_shards(tmp_path, index)
    assert len(index.of("train")) > 8
    for split in SPLITS:
        names = [shard.name for shard in index.of(split)]
        assert names == [f"{split}-000-{n:05}.bin" for n in range(len(names))]
    assert all(30_000 <= shard.tokens < 60_000 for shard in index.of("train")[:-1])
    for split in ("train", "val"):
        expected = Counter(
            text for text in texts if is_validation(text, HELD_OUT) == (split == "val")
        )
        assert Counter(texts_of(tmp_path, split)) == expected
        shards = index.of(split)
        assert sum(shard.documents for shard in shards) == expected.total()
        assert sum(shard.text_bytes for shard in shards) == sum(map(len, expected.elements()))
        assert all(shard.tokens == shard.text_bytes + shard.documents for shard in shards)


def test_repeated_kills_do_not_change_the_result(
    config: DataConfig, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kept: dict[str, int] = {}
    for count in (1, 15):
        process = start(config.source, out)
        wait_for_shards(process, out, count)
        workers = workers_of(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert "Traceback" not in process.text("err")
        wait_for_end(workers)
        index = json.loads((out / INDEX).read_text())
        assert not index["finished"]
        for shard in index["shards"]:
            written = (out / shard["name"]).stat().st_mtime_ns
            assert kept.setdefault(shard["name"], written) == written  # never rewritten
    assert len(kept) >= 15
    prepare(config, out, shard_tokens=10_000)
    assert contents(out) == uninterrupted


@pytest.mark.parametrize(
    ("interruption", "code", "line"),
    [
        ("killed writer", 2, r"out: its worker was ended by signal 9 .*memory.*; run the same"),
        ("Ctrl-C", 130, r"nsa: stopped; the same command resumes"),
    ],
)
def test_after_an_interruption_the_same_command_resumes(
    config: DataConfig,
    uninterrupted: dict[str, bytes],
    tmp_path: Path,
    interruption: str,
    code: int,
    line: str,
) -> None:
    out = tmp_path / "out"
    process = start(config.source, out)
    wait_for_shards(process, out, 3)
    (writer,) = workers_of(process.pid)
    if interruption == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        os.kill(writer, signal.SIGKILL)
    assert process.wait() == code
    assert re.search(line, process.text("err"))
    assert "Traceback" not in process.text("err")
    wait_for_end([writer])
    prepare(config, out, shard_tokens=10_000)
    assert contents(out) == uninterrupted


def test_after_a_full_disk_the_same_command_resumes(
    config: DataConfig, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as disk:
        out = disk / "out"
        with pytest.raises(DataError, match=rf"{out}: the disk is full: 20,000 bytes or more are"):
            prepare(config, out, shard_tokens=10_000)
        assert not list(out.glob(".*.bin*"))
        mount("-o", "remount,size=64m", str(disk))
        prepare(config, out, shard_tokens=10_000)
        assert contents(out) == uninterrupted


def test_a_finished_folder_is_not_rewritten(
    config: DataConfig, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, content in uninterrupted.items():
        (out / name).write_bytes(content)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with patch("nsa.data.writer.open_dataset", side_effect=AssertionError("it may be gone")):
        prepare(config, out, shard_tokens=10_000)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    index = read_index(out)
    write_index(out, replace(index, finished=False))  # as if stopped at the end
    for draft in (".train-000-00099.bin.9", f".{INDEX}.9"):  # of a process that was killed
        (out / draft).touch()
    assert prepare(config, out, shard_tokens=10_000) == index
    assert contents(out) == uninterrupted
    moved = replace(index, stamp=replace(index.stamp, tokenizer="hf:/moved"))
    write_index(out, moved)
    assert prepare(config, out, shard_tokens=10_000) == moved, "its ids are the same"
    write_index(out, replace(index, finished=False))
    (out / index.shards[3].name).unlink()
    with pytest.raises(DataError, match=rf"{index.shards[3].name}: this shard is missing"):
        prepare(config, out, shard_tokens=10_000)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer") / "saved"
    train_tokenizer(generated(100_000), 400, out)
    return out


def test_a_folder_is_resumed_only_with_the_same_settings(
    config: DataConfig, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(config.source, out)
    wait_for_shards(process, out, 1)
    (writer,) = workers_of(process.pid)
    os.kill(writer, signal.SIGSTOP)
    with pytest.raises(DataError, match=r"another process is writing into it"):
        prepare(config, out, shard_tokens=10_000)
    process.kill()
    os.kill(writer, signal.SIGCONT)  # it notices the end
    process.wait()
    for other, shard_tokens, difference in (
        (replace(config, source="embedded"), 10_000, r"source = '.*', not 'embedded'"),
        (replace(config, held_out=0.3), 10_000, r"held_out = 0\.2, not 0\.3"),
        (replace(config, pattern="*.jsonl"), 10_000, r"pattern = None, not '\*\.jsonl'"),
        (config, 7, r"shard_tokens = 10000, not 7"),
        (replace(config, tokenizer=f"hf:{trained}"), 10_000, r"tokenizer = 'byte', not 'hf:.*'"),
    ):
        with pytest.raises(DataError, match=rf"{out} was started with {difference}.*another --out"):
            prepare(other, out, shard_tokens=shard_tokens)
    plan = find_index(out)
    write_index(out, replace(plan, stamp=replace(plan.stamp, tokenizer_fingerprint="0")))
    with pytest.raises(DataError, match=r"tokenizer_fingerprint = '0', not '.*'; name another"):
        prepare(config, out, shard_tokens=10_000)


def test_giant_empty_and_binary_documents_are_prepared(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = {"giant": b"x " * 3_000_000, "bytes": b"\xff\xfe\x00caf\xe9", "one": b"1", "eos": b"\n"}
    for name, text in {**texts, "empty": b""}.items():
        (folder / f"{name}.txt").write_bytes(text)
    config = DataConfig(source=str(folder), held_out=0.5)
    prepare(config, tmp_path / "out", shard_tokens=1_000)
    halves = HeldOut(0.5, by_position=True)
    for split in SPLITS:
        parts = (halves.text_for(text, split) for text in texts.values())
        assert sorted(texts_of(tmp_path / "out", split)) == sorted(filter(None, parts))


def test_after_an_early_error_a_corrected_command_or_source_may_use_the_folder(
    tmp_path: Path,
) -> None:
    source = write_lines(tmp_path / "texts.jsonl", [])
    right, wrong = DataConfig(source=source), DataConfig(source=source, text_field="body")
    with pytest.raises(DataError, match=r"texts\.jsonl' holds no documents"):
        prepare(right, tmp_path / "filled")
    write_lines(tmp_path / "texts.jsonl", generated(10_000))
    assert prepare(right, tmp_path / "filled").of("train")
    with pytest.raises(DataError, match="no field 'body', but 'text'"):
        prepare(wrong, tmp_path / "corrected")
    assert prepare(right, tmp_path / "corrected").finished


def test_bad_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for config, message in (
        (DataConfig(source={"embedded": 1, "synthetic": 2}), r"each source of a mixture"),
        (DataConfig(source="synthetic", held_out=0), r"data\.held_out = 0"),
        (DataConfig(source="synthetic", tokenizer="hf:/no"), r"no such folder"),
        (DataConfig(source=str(tmp_path / "no.jsonl")), r"no such file or folder"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(config, out)
        assert not out.exists()
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(DataError, match=r"it already holds 'precious.txt'"):
        prepare(DataConfig(source="synthetic"), out)


def test_documents_are_tokenized_up_to_a_thousand_or_a_size_at_a_time(tmp_path: Path) -> None:
    count = DOCUMENTS_PER_CALL + 9
    path = Path(write_lines(tmp_path / "a.jsonl", [b"ten bytes!"] * count))
    documents = open_files(path, "text").read()
    calls = [len(next_documents(documents, size)) for size in (21, 20, 10**9, 10**9, 10**9)]
    assert calls == [3, 2, DOCUMENTS_PER_CALL, 4, 0]


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    return Path(write_lines(path, generated(60_000), field="body"))


def call(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


def test_prepare_and_check_report_contents_and_damage(
    body: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("HOME", str(tmp_path))
    source = ("--source", body, "--text-field", "body")
    prepare = ("prepare", *source, "--tokenizer", "byte", "--out=~/out", "--held-out", "0.1")
    assert call(*prepare) == 0
    output = capsys.readouterr()
    assert f"{out} is finished\ntrain: " in output.out
    assert "60.0k/" in output.err or "60.0kB" in output.err  # the bar
    assert call(*prepare) == 0
    assert f"{out} was already finished\n" in capsys.readouterr().out
    again = ("--source", out, "--tokenizer", "byte", "--out", tmp_path / "again")
    assert call("prepare", *again) == 2
    message = f"nsa: --source = '{out}': is prepared already; train on it\n"
    assert capsys.readouterr().err == message

    assert call("check", "~/out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out}: source {body}, tokenizer byte; intact"
    assert lines[1].startswith("train: ")
    assert lines[2].startswith("val: ")
    assert lines[2].endswith(" in 1 shard")

    shard = out / "val-000-00000.bin"
    flip_a_bit(shard)
    assert call("check", out) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"nsa: {shard}: its content changed since it was written")
    assert output.err.count("\n") == 1


def test_the_contents_of_each_split_are_reported_also_of_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = write_lines(tmp_path / "many.jsonl", [b"document %d" % n for n in range(1_000)])
    source = ("--source", many, "--tokenizer", "byte", "--held-out", "1e-9")
    flags = ("--out", tmp_path / "out", "--shard-tokens", 5_000)
    assert call("prepare", *source, *flags) == 2
    assert "val: no documents, so no run can use" in capsys.readouterr().out
    assert call("check", tmp_path / "out") == 0
    train, val = capsys.readouterr().out.splitlines()[1:]
    assert train == (
        "train: 12,890 tokens of 1,000 documents and 11,890 bytes, 0.92 bytes a token, in 3 shards"
    )
    assert "data.held_out was 1e-09" in val


def test_mistakes_are_one_line_and_exit_code_2(
    body: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    source = ["prepare", "--source", body, "--tokenizer", "byte"]
    for arguments, expected in (
        ([*source, *out], "--text-field"),
        ([*source, *out, "--shard-tokens=0"], "--shard-tokens 0: must be 1 or more"),
        ([*source, "--text-field=body", "--out", body / "out"], "out: cannot be written or locked"),
        (["prepare", "--source", "synthetic", "--tokenizer", "word", *out], "--tokenizer"),
        (["check", tmp_path / "nowhere"], "nowhere"),
    ):
        assert call(*arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = (line for line in output.err.splitlines() if line.startswith("nsa: "))
        assert expected in line


def test_every_flag_of_prepare_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Mock(side_effect=DataError("recorded"))
    monkeypatch.setattr("nsa.data.writer.prepare", prepared)
    values: dict[str, Any] = {"source": "hf:a/b", "subset": "c", "split": "d", "pattern": "*.e"}
    values |= {"on_error": "skip", "text_field": "f", "tokenizer": "hf:g", "held_out": 0.25}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    assert call("prepare", *flags, "--out", tmp_path / "out", "--shard-tokens=7") == 2
    prepared.assert_called_once_with(DataConfig(**values), tmp_path / "out", shard_tokens=7)


def writer_of(folder: Path, kind: type[DividedSource], name: str = "books") -> Writer:
    source = kind(DataConfig(source=name), name, HeldOut(0.1))
    job = Job(source, ByteTokenizer(), folder, plan_of(source, ByteTokenizer()))
    return Writer(job, lock(folder))


def error_of(writer: Writer) -> DataError:
    """The error with which a writer ends."""
    with closing(writer):
        try:
            wait_for(lambda: not writer.is_running())
        except DataError as error:
            return error
    raise AssertionError("it ended without an error")


def test_an_unexpected_error_is_a_crash_below_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = error_of(writer_of(tmp_path / "out", Fails))
    assert isinstance(error, WorkerDied)
    assert f"{tmp_path}/out: its worker ended with exit code 1, after the error above" in str(error)
    output = capfd.readouterr()
    assert "KeyError: 'no such key'" in output.err
    assert "a progress bar\nfrom C\n" in output.err
    assert not output.out


def test_a_process_that_ends_before_it_reads_its_job_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    error = error_of(writer_of(tmp_path / "out", Fails, "x" * 1_000_000))  # no pipe holds that
    assert "its worker ended with exit code 1" in str(error)


def test_it_starts_in_any_folder_and_without_slow_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if sys.version_info >= (3, 11):  # earlier versions always search the working directory first
        (tmp_path / "numpy.py").write_text("raise ImportError('wrong numpy')")
    monkeypatch.chdir(tmp_path)
    error = error_of(writer_of(tmp_path / "out", Unreached))
    assert repr(error) == "SourceUnreachable('no hub')", "a dry run only notes that"
    modules = set(capfd.readouterr().err.split())
    assert "nsa.data.shards" in modules
    assert not modules & {"torch", "deepspeed", "transformers", "datasets", "pyarrow", "pandas"}


def test_a_closed_writer_leaves_no_process(tmp_path: Path) -> None:
    """Not even a zombie, of which a run that opens cache after cache would gather many."""
    writer = writer_of(tmp_path / "out", Unreached)
    (pid,) = workers_of(os.getpid())
    writer.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_writer_that_waits_for_text_ends_with_its_parent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow.jsonl")
    parent = start(tmp_path / "slow.jsonl", tmp_path / "out")
    wait_for(lambda: workers_of(parent.pid) and (tmp_path / "out/index.json").exists())
    workers = workers_of(parent.pid)
    parent.kill()
    parent.wait()
    wait_for_end(workers)
