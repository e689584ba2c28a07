"""Preparing: every document once, whatever stops the work in between."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nsa.data.builtin import synthetic
from nsa.data.config import DataConfig
from nsa.data.prepare import prepare
from nsa.data.shards import INDEX, Index, open_shards, verify_shards
from nsa.data.source import DataError, held_out
from nsa.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer, train_tokenizer

SHARE = 0.2  # held out, so that there is some of it in every part
PATIENCE = 60.0  # seconds after which something that was waited for is not coming


def write_lines(path: Path, texts: Sequence[bytes]) -> Path:
    lines = [json.dumps({"text": text.decode(), "source": "test"}) for text in texts]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def words(size: int) -> list[bytes]:
    return [document.text for document in synthetic(size).read()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of JSON lines with 1 MB of text, which takes a moment to prepare."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = words(1_000_000)
    for number in range(3):
        write_lines(folder / f"{number}.jsonl", texts[number::3])
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the folder holds that `begin` prepares, if nothing stops it."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    config = DataConfig(source=str(corpus), held_out=SHARE)
    prepare(config, out, shard_tokens=10_000, workers=2, progress=False)
    return contents(out)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def command(corpus: Path | str, out: Path, *more: str) -> list[str]:
    flags = ["--source", str(corpus), "--tokenizer", "byte", "--out", str(out)]
    flags += ["--held-out", str(SHARE), "--shard-tokens", "10000", "--workers", "2"]
    return [sys.executable, "-m", "nsa", "data", "prepare", *flags, *more]


def begin(corpus: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(corpus, out),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_shards(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Until there are so many in the folder, of a process that is still at work."""
    deadline = time.monotonic() + PATIENCE
    while len(list(out.glob("*.bin"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def wait_for_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def texts_of(out: Path, split: str, tokenizer: Tokenizer) -> list[bytes]:
    store = open_shards(str(out), split)
    tokens = store.read(0, len(store))
    ends = np.flatnonzero(tokens == store.eos_id)
    assert ends[-1] == len(tokens) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(tokens[a:b]) for a, b in zip(starts, ends, strict=True)]


def test_every_document_is_in_one_split_once(corpus: Path, tmp_path: Path) -> None:
    texts = words(1_000_000)
    config = DataConfig(source=str(corpus), held_out=SHARE)
    index = prepare(config, tmp_path, shard_tokens=50_000, workers=4, progress=False)
    verify_shards(tmp_path, index)
    assert len(index.of("train")) > 8  # each part has several
    for split in ("train", "val"):
        wanted = Counter(text for text in texts if held_out(text, SHARE) == (split == "val"))
        assert Counter(texts_of(tmp_path, split, ByteTokenizer())) == wanted
        shards = index.of(split)
        assert sum(shard.documents for shard in shards) == wanted.total()
        assert sum(shard.text_bytes for shard in shards) == sum(map(len, wanted.elements()))
        assert all(shard.tokens == shard.text_bytes + shard.documents for shard in shards)


@pytest.mark.parametrize("whom", ["all of it", "only the process that was started"])
def test_killed_again_and_again_it_ends_as_if_undisturbed(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path, whom: str
) -> None:
    out = tmp_path / "out"
    kept: dict[str, int] = {}
    for count in (1, 15, 50):
        process = begin(corpus, out)
        wait_for_shards(process, out, count)
        workers = workers_of(process)
        if whom == "all of it":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        _, said = process.communicate()
        assert "Traceback" not in said
        wait_for_end(workers)
        assert not (out / INDEX).exists()
        states = [json.loads(path.read_text()) for path in out.glob("part-*.json")]
        for shard in (shard for state in states for shard in state["shards"]):
            written = (out / shard["name"]).stat().st_mtime_ns
            assert kept.setdefault(shard["name"], written) == written  # goes on, not over it
    assert len(kept) > 30
    process = begin(corpus, out)
    said, _ = process.communicate()
    assert process.returncode == 0
    assert f"{out} is finished" in said
    assert contents(out) == undisturbed


def test_workers_that_wait_for_text_end_with_whoever_started_them(tmp_path: Path) -> None:
    pipe = tmp_path / "never.jsonl"
    os.mkfifo(pipe)
    process = begin(pipe, tmp_path / "out")
    writer = open_once_it_is_read(pipe, process)
    workers = workers_of(process)
    process.kill()
    process.communicate()
    wait_for_end(workers)
    os.close(writer)  # up to here more text could have come


def open_once_it_is_read(pipe: Path, process: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            time.sleep(0.01)


def test_a_worker_that_is_killed_ends_all_and_the_same_command_goes_on(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = begin(corpus, out)
    wait_for_shards(process, out, 3)
    workers = workers_of(process)
    os.kill(workers[0], signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 2
    assert "died with exit code -9 (killed: out of memory?); run the same" in said
    wait_for_end(workers)
    assert not list(out.glob(".*"))
    assert begin(corpus, out).wait() == 0
    assert contents(out) == undisturbed


def test_ctrl_c_ends_it_in_one_line_and_the_same_command_goes_on(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = begin(corpus, out)
    wait_for_shards(process, out, 3)
    workers = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody gets it
    _, said = process.communicate()
    assert process.returncode == 130
    assert "nsa: stopped; the same command goes on" in said
    assert "Traceback" not in said
    wait_for_end(workers)
    assert not list(out.glob(".*"))
    assert begin(corpus, out).wait() == 0
    assert contents(out) == undisturbed


def test_a_disk_that_fills_is_named_and_with_more_room_the_same_command_goes_on(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    private = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*private, "true"]).returncode:
        pytest.skip("needs `unshare` to mount a small disk of its own, which is not allowed here")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    again = " ".join(command(corpus, disk / "out"))
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {disk} || exit 9\n"
        f"{again}; echo ended with $?; ls -A {disk}/out | grep draft\n"
        f"mount -o remount,size=64m {disk} && {again} && cp -r {disk}/out {copy}\n"
    )
    run = subprocess.run([*private, "sh", "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("ended with 2\n/"), run.stdout  # and no draft is left
    refusal = next(line for line in run.stderr.splitlines() if line.startswith("nsa: "))
    assert f"{disk}/out: the disk is full: " in refusal
    assert "are free; free some space and run the same `nsa data prepare` again" in refusal
    assert contents(copy) == undisturbed


def test_a_finished_folder_is_left_as_it_is(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, content in undisturbed.items():
        (out / name).write_bytes(content)
    config = DataConfig(source=str(corpus), held_out=SHARE)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    index = prepare(config, out, shard_tokens=10_000, workers=3, progress=False)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / INDEX).unlink()  # an index that got lost is written again
    index = prepare(config, out, shard_tokens=10_000, workers=3, progress=False)
    assert index.parts == 2  # the number that it was begun with
    assert contents(out) == undisturbed
    (out / INDEX).unlink()
    (out / index.shards[3].name).unlink()
    with pytest.raises(DataError, match=rf"{index.shards[3].name}: this shard is gone"):
        prepare(config, out, shard_tokens=10_000, progress=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer") / "saved"
    train_tokenizer(synthetic(100_000), 400, out)
    return out


def test_other_text_is_never_mixed_into_a_folder(
    corpus: Path, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = DataConfig(source=str(corpus), held_out=SHARE)
    process = begin(corpus, out)
    wait_for_shards(process, out, 1)
    with pytest.raises(DataError, match=r"another `nsa data prepare` is writing into it"):
        prepare(config, out, shard_tokens=10_000, progress=False)
    process.kill()
    process.communicate()
    for other, shard_tokens, said in (
        (replace(config, source="embedded"), 10_000, r"source = '.*', not 'embedded'"),
        (replace(config, held_out=0.3), 10_000, r"held_out = 0\.2, not 0\.3"),
        (replace(config, text_field="body"), 10_000, r"text_field = 'text', not 'body'"),
        (config, 7, r"shard_tokens = 10000, not 7"),
        (replace(config, tokenizer=f"hf:{trained}"), 10_000, r"tokenizer_fingerprint = '.*'"),
    ):
        with pytest.raises(DataError, match=rf"{out} was begun with {said}.*another --out"):
            prepare(other, out, shard_tokens=shard_tokens, progress=False)


def test_any_tokenizer_keeps_documents_apart(trained: Path, tmp_path: Path) -> None:
    texts = [*words(30_000), b"it says <|endoftext|> twice <|endoftext|>", "naïve 日本".encode()]
    source = write_lines(tmp_path / "texts.jsonl", texts)
    config = DataConfig(source=str(source), tokenizer=f"hf:{trained}", held_out=SHARE)
    index = prepare(config, tmp_path / "out", workers=2, progress=False)
    tokenizer = build_tokenizer(config)
    assert index.stamp.tokenizer_fingerprint == tokenizer.fingerprint
    found = [
        text for split in ("train", "val") for text in texts_of(tmp_path / "out", split, tokenizer)
    ]
    assert sorted(found) == sorted(texts)


def test_hostile_documents_come_through(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = {"giant": b"x " * 3_000_000, "bytes": b"\xff\xfe\x00caf\xe9", "one": b"1", "eos": b"\n"}
    for name, text in {**texts, "empty": b""}.items():
        (folder / f"{name}.txt").write_bytes(text)
    config = DataConfig(source=str(folder), held_out=0.5)
    index = prepare(config, tmp_path / "out", shard_tokens=1_000, workers=2, progress=False)
    found = [
        text
        for split in ("train", "val")
        if index.of(split)
        for text in texts_of(tmp_path / "out", split, ByteTokenizer())
    ]
    assert sorted(found) == sorted(texts.values())


def test_a_record_that_cannot_be_read_ends_all_with_its_place(tmp_path: Path) -> None:
    texts = words(50_000)
    source = write_lines(tmp_path / "texts.jsonl", texts)
    with source.open("a") as file:
        file.write('{"body": "no text"}\n')
    with pytest.raises(DataError, match=rf"texts\.jsonl:{len(texts) + 1}.*text"):
        prepare(DataConfig(source=str(source)), tmp_path / "out", workers=2, progress=False)
    assert not list((tmp_path / "out").glob(".*"))


def test_a_folder_into_which_nothing_was_written_is_free_for_the_corrected_command(
    tmp_path: Path,
) -> None:
    source = str(write_lines(tmp_path / "texts.jsonl", words(10_000)))
    wrong = DataConfig(source=source, text_field="body")
    with pytest.raises(DataError, match="no field 'body', but 'text'"):
        prepare(wrong, tmp_path / "out", workers=2, progress=False)
    index = prepare(DataConfig(source=source), tmp_path / "out", workers=1, progress=False)
    assert index.parts == 1


def test_an_empty_source_is_refused_and_may_be_filled(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", [])
    with pytest.raises(DataError, match=r"texts\.jsonl' holds no documents"):
        prepare(DataConfig(source=str(source)), tmp_path / "out", workers=2, progress=False)
    write_lines(source, words(10_000))
    index = prepare(DataConfig(source=str(source)), tmp_path / "out", workers=2, progress=False)
    assert index.of("train")


def test_fewer_documents_than_workers_are_prepared_all_the_same(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", [b"only one"])
    config = DataConfig(source=str(source), held_out=1e-9)
    index: Index = prepare(config, tmp_path / "out", workers=3, progress=False)
    assert texts_of(tmp_path / "out", "train", ByteTokenizer()) == [b"only one"]
    assert not index.of("val")
    with pytest.raises(DataError, match=r"no document for split 'val'.*data\.held_out = 1e-09"):
        open_shards(str(tmp_path / "out"), "val")


def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for config, more, said in (
        (DataConfig(source={"embedded": 1, "synthetic": 2}), {}, r"each source of a mixture"),
        (DataConfig(source="synthetic", held_out=0), {}, r"data\.held_out = 0"),
        (DataConfig(source="synthetic"), {"workers": 0}, r"--workers 0"),
        (DataConfig(source="synthetic"), {"shard_tokens": 0}, r"--shard-tokens 0"),
        (DataConfig(source="synthetic", tokenizer="hf:/no"), {}, r"no such folder"),
        (DataConfig(source=str(tmp_path / "no.jsonl")), {}, r"no such file or folder"),
    ):
        with pytest.raises(ValueError, match=said):
            prepare(config, out, progress=False, **more)
        assert not out.exists()
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(DataError, match=r"there is 'precious.txt' in it already"):
        prepare(DataConfig(source="synthetic"), out, progress=False)
