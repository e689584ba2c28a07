"""Prepared shards: reads return what was written, and errors name the damaged file."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from nsa.data.shards import (
    BUFFER_BYTES,
    INDEX,
    Index,
    Stamp,
    TokenStore,
    is_prepared,
    open_shard,
    open_shards,
    read_index,
    verify_shards,
    write_index,
    write_shard,
)
from nsa.data.source import DataError
from nsa.data.tokenizer import TokenArray

STAMP = Stamp(
    source="/data/books.jsonl",
    tokenizer="hf:bücher",
    tokenizer_fingerprint="ab" * 32,
    vocab_size=50_257,
    eos_id=50_256,
    dtype="uint16",
)
LENGTHS = {"train-000-00000.bin": (3, 1, 5), "train-000-00001.bin": (2,), "val-000-00000.bin": (4,)}


def documents(name: str, stamp: Stamp = STAMP) -> list[TokenArray]:
    random = np.random.default_rng(len(name) + int(name[-5]))
    return [
        np.append(random.integers(0, stamp.eos_id, length - 1), stamp.eos_id)
        for length in LENGTHS[name]
    ]


def write_folder(folder: Path, stamp: Stamp = STAMP) -> Path:
    """Two shards for training, 9 and 2 tokens long, and one for validation."""
    folder.mkdir()
    shards = [
        write_shard(folder, name, name.split("-")[0], stamp, documents(name, stamp), 20)
        for name in LENGTHS
    ]
    write_index(folder, Index(stamp, {"held_out": 0.05}, shards))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "prepared")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(50_257, "uint16"), (100_000, "uint32")])
def test_tokens_survive_a_round_trip(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    stamp = replace(STAMP, vocab_size=vocab_size, eos_id=vocab_size - 1, dtype=dtype)
    folder = write_folder(tmp_path / "prepared", stamp)
    names = [name for name in LENGTHS if name.startswith("train")]
    tokens = np.concatenate([document for name in names for document in documents(name, stamp)])
    store = open_shards(str(folder), "train")
    assert len(store) == len(tokens) == 11
    for start in range(11):
        for stop in range(start + 1, 12):
            assert np.array_equal(store.read(start, stop), tokens[start:stop])
    assert store.read(0, 11).dtype == np.dtype(dtype)
    assert store.stamp == stamp
    assert store.bytes_per_token == pytest.approx(40 / 11)
    verify_shards(folder, read_index(folder))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_shard_larger_than_a_read_is_intact_and_verified_to_its_last_token(
    dtype: str, tmp_path: Path
) -> None:
    stamp = replace(STAMP, vocab_size=60_000, eos_id=59_999, dtype=dtype)
    tokens = np.arange(BUFFER_BYTES + 3) % 50_000
    tokens[-1] = stamp.eos_id
    shard = write_shard(tmp_path, "train-000-00000.bin", "train", stamp, [tokens], 1)
    index = Index(stamp, {}, [shard])
    verify_shards(tmp_path, index)
    tracemalloc.start()
    TokenStore(tmp_path, "large", index, "train").read(0, 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < shard.tokens, "a shard is mapped, not read"
    path = tmp_path / shard.name
    intact = path.read_bytes()
    for at in (0, BUFFER_BYTES, len(intact) - 1):
        damaged = bytearray(intact)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="its content changed since it was written"):
            verify_shards(tmp_path, index)


def test_a_store_opens_each_shard_once_and_keeps_few_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have 1,024 open files, and a corpus more shards."""
    monkeypatch.setattr("nsa.data.shards.OPEN_SHARDS", 3)
    names = [f"train-000-{number:05}.bin" for number in range(9)]
    tokens = [np.array([1, STAMP.eos_id])]
    shards = [write_shard(tmp_path, name, "train", STAMP, tokens, 1) for name in names]
    store = TokenStore(tmp_path, "many", Index(STAMP, {}, shards), "train")
    opened = Mock(side_effect=open_shard)
    monkeypatch.setattr("nsa.data.shards.open_shard", opened)
    for _ in range(2):
        for start in (0, 2, 4):
            store.read(start, start + 2)
    assert opened.call_count == 3
    store.read(0, len(store))
    links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    assert len({link for link in links if link.startswith(str(tmp_path))}) == 3


def test_the_fingerprint_is_of_a_splits_tokens(folder: Path, tmp_path: Path) -> None:
    same = write_folder(tmp_path / "same")
    other = write_folder(tmp_path / "other", replace(STAMP, eos_id=7))
    fingerprints = [
        open_shards(str(path), split).fingerprint
        for path, split in ((folder, "train"), (same, "train"), (folder, "val"), (other, "train"))
    ]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3
    index = read_index(same)  # the last shard alone differs
    last = [np.array([1, STAMP.eos_id], np.uint16)]
    shard = write_shard(same, "train-000-00001.bin", "train", STAMP, last, 1)
    write_index(same, replace(index, shards=[index.shards[0], shard]))
    assert open_shards(str(same), "train").fingerprint not in fingerprints


def test_prepared_folders_are_recognised_by_their_content(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_prepared(str(folder))
    assert is_prepared("~/prepared")  # otherwise its index would be read as text
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:-40])
    assert is_prepared(str(folder))  # open_shards reports the damage
    (folder / INDEX).write_text('{\n "format": "nsa shards",\n "version": 1')  # of any version
    assert is_prepared(str(folder))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / INDEX).write_text('{"version": 2, "shards": []}')  # of another program
    for other in (tmp_path / "text", tmp_path, tmp_path / "nowhere", "embedded", folder / INDEX):
        assert not is_prepared(str(other))


def test_an_unfinished_folder_is_refused_with_the_fix(folder: Path) -> None:
    write_index(folder, replace(read_index(folder), finished=False))
    assert is_prepared(str(folder))
    with pytest.raises(DataError, match=r"unfinished; run the same command again"):
        open_shards(str(folder), "train")


def test_an_empty_split_is_refused_with_its_held_out(folder: Path) -> None:
    index = read_index(folder)
    write_index(folder, replace(index, shards=index.of("train")))
    with pytest.raises(DataError, match=r"split 'val'; raise data\.held_out = 0\.05"):
        open_shards(str(folder), "val")
    write_index(folder, replace(index, shards=index.of("val")))
    with pytest.raises(DataError, match=r"split 'train'; lower data\.held_out = 0\.05"):
        open_shards(str(folder), "train")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "this shard is missing"),
        (lambda path: os.truncate(path, 0), "truncated: 0 bytes"),
        (lambda path: os.truncate(path, 17), "truncated: 17 bytes instead of 18"),
        (lambda path: os.truncate(path, 19), "too long: 19 bytes instead of 18"),
    ],
    ids=["missing", "empty", "truncated", "too long"],
)
def test_a_damaged_shard_is_refused_by_name(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = folder / "train-000-00000.bin"
    damage(path)
    for refuse in (
        lambda: open_shards(str(folder), "train"),
        lambda: verify_shards(folder, read_index(folder)),
    ):
        with pytest.raises(DataError, match=f"{path}.*{message}.*restore the file, or") as refused:
            refuse()
        assert "\n" not in str(refused.value)
    open_shards(str(folder), "val")  # the other split is intact


def test_verify_names_an_unlisted_shard(folder: Path) -> None:
    shutil.copy(folder / "train-000-00001.bin", folder / "train-000-00002.bin")
    with pytest.raises(DataError, match=r"train-000-00002\.bin: not listed"):
        verify_shards(folder, read_index(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "of format 1, and this nsa reads format 2; prepare the folder again"),
        ({"stamp": {}}, "damaged"),
        ({"stamp": asdict(replace(STAMP, eos_id=STAMP.vocab_size))}, "damaged"),
        ({"stamp": asdict(replace(STAMP, dtype="O"))}, "damaged"),  # addresses of objects
        ({"shards": None}, "damaged"),
    ],
)
def test_a_damaged_index_is_refused_by_name(folder: Path, change: dict, message: str) -> None:
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**content, **change}))
    with pytest.raises(DataError, match=rf"index\.json.*{message}"):
        open_shards(str(folder), "train")


@pytest.mark.parametrize("name", ["tokens", "documents", "text_bytes"])
def test_a_shard_of_nothing_is_refused(folder: Path, name: str) -> None:
    """Without bytes of text, bits per byte would divide by zero."""
    index = read_index(folder)
    write_index(folder, replace(index, shards=[replace(index.shards[0], **{name: 0})]))
    with pytest.raises(DataError, match=r"index\.json: damaged .*train-000-00000.* with \("):
        open_shards(str(folder), "train")


def test_tokens_outside_the_vocabulary_are_refused_by_name(folder: Path) -> None:
    """They would fail inside the embedding, on a GPU without a name."""
    smaller = replace(STAMP, vocab_size=STAMP.eos_id, eos_id=7)
    write_index(folder, replace(read_index(folder), stamp=smaller))
    with pytest.raises(DataError, match=r"00000\.bin: holds the id 50256 at or after token 0"):
        open_shards(str(folder), "train").read(0, 3)


def test_replacing_a_shard_does_not_change_an_open_store(folder: Path, tmp_path: Path) -> None:
    store = open_shards(str(folder), "train")
    before = store.read(0, 11).copy()
    other = write_folder(tmp_path / "other", replace(STAMP, eos_id=7))
    for name in LENGTHS:
        (other / name).replace(folder / name)
    assert np.array_equal(store.read(0, 11), before)


READ_WHILE = """
import sys
from nsa.data.shards import open_shards
store = open_shards(sys.argv[1], "train")
print(store.read(0, 9).sum(), flush=True)
sys.stdin.readline()
try:
    print(store.read(0, 9).sum())
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("how", ["truncated", "overwritten"])
def test_writing_into_a_shard_in_use_is_an_error_not_a_crash(folder: Path, how: str) -> None:
    path = folder / "train-000-00000.bin"
    with subprocess.Popen(
        [sys.executable, "-c", READ_WHILE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().strip().isdigit()
        if how == "truncated":
            os.truncate(path, 0)
        else:
            with path.open("r+b") as file:
                file.write(b"\1\0" * 9)
        output, _ = process.communicate("continue\n")
    assert process.returncode == 0
    assert output.startswith(f"DataError {path}: overwritten or truncated while in use")


def test_an_open_reader_keeps_the_old_content_of_a_rewritten_file(folder: Path) -> None:
    before = (folder / INDEX).read_bytes()
    with (folder / INDEX).open("rb") as file:
        write_index(folder, replace(read_index(folder), settings={"held_out": 0.5}))
        assert file.read() == before
    assert read_index(folder).settings == {"held_out": 0.5}
