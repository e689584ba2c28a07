"""Prepared shards: what is read is what was written, and what is damaged is named."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nsa.data.shards import (
    HEADER,
    INDEX,
    PLAN,
    Index,
    Stamp,
    document_ends,
    is_prepared,
    longest_document,
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
    write_index(folder, Index(stamp, {"held_out": 0.05}, 1, shards))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "prepared")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(50_257, "uint16"), (100_000, "uint32")])
def test_tokens_and_ends_are_read_as_they_were_written(
    tmp_path: Path, vocab_size: int, dtype: str
) -> None:
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
    assert (store.vocab_size, store.eos_id) == (vocab_size, vocab_size - 1)
    assert store.bytes_per_token == pytest.approx(40 / 11)
    assert store.tokenizer == STAMP.tokenizer_fingerprint
    index = read_index(folder)
    assert document_ends(folder, index.shards[0], stamp).tolist() == [3, 4, 9]
    assert longest_document(folder, index.shards[0], stamp) == 5
    verify_shards(folder, index)


def test_the_fingerprint_is_of_the_tokens_of_a_split(folder: Path, tmp_path: Path) -> None:
    same = write_folder(tmp_path / "same")
    other = write_folder(tmp_path / "other", replace(STAMP, eos_id=7))
    prints = [
        open_shards(str(path), split).fingerprint
        for path, split in ((folder, "train"), (same, "train"), (folder, "val"), (other, "train"))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_a_folder_is_known_as_prepared_by_what_is_in_it(folder: Path, tmp_path: Path) -> None:
    assert is_prepared(str(folder))
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:-40])
    assert is_prepared(str(folder))  # and open_shards says what is wrong with it
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / INDEX).write_text('{"version": 2, "shards": []}')  # somebody else's
    (tmp_path / "text" / PLAN).write_text("{}")
    for other in (tmp_path / "text", tmp_path, tmp_path / "nowhere", "embedded", folder / INDEX):
        assert not is_prepared(str(other))


def test_an_unfinished_folder_is_refused_with_the_mend(folder: Path) -> None:
    (folder / INDEX).rename(folder / PLAN)
    assert is_prepared(str(folder))
    with pytest.raises(DataError, match=r"unfinished: run the same `nsa data prepare` again"):
        open_shards(str(folder), "train")


def test_a_split_without_documents_is_refused_by_naming_the_share(folder: Path) -> None:
    index = read_index(folder)
    write_index(folder, replace(index, shards=index.of("train")))
    with pytest.raises(DataError, match=r"no document for split 'val'.*data\.held_out = 0\.05"):
        open_shards(str(folder), "val")


def damage(path: Path, how: str) -> None:
    """What can happen to a shard, or to an index, between two runs."""
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "empty":
        content = bytearray()
    elif how == "cut off":
        del content[-1]
    elif how == "too long":
        content += b"x"
    elif how == "foreign":
        content[:8] = b"\x93NUMPY\x01\x00"
    elif how == "newer":
        content[8:12] = struct.pack("<I", 2)
    elif how == "header":
        content[20:30] = b"\xff" * 10
    elif how == "one bit":
        content[HEADER + 3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gone", "this shard is gone"),
        ("empty", "cut off: 0 bytes"),
        ("cut off", "cut off: 4,143 bytes instead of 4,144"),
        ("too long", "too long: 4,145 bytes instead of 4,144"),
        ("foreign", "no shard that `nsa data prepare` wrote"),
        ("newer", r"a newer nsa \(format 2, this one reads 1\)"),
        ("header", "is not the shard that index.json lists: its source is None"),
    ],
)
def test_a_shard_that_is_not_what_it_was_is_named_and_refused(
    folder: Path, how: str, said: str
) -> None:
    path = folder / "train-000-00000.bin"
    damage(path, how)
    for refuse in (
        lambda: open_shards(str(folder), "train"),
        lambda: verify_shards(folder, read_index(folder)),
    ):
        with pytest.raises(DataError, match=f"{path}.*{said}") as refused:
            refuse()
        assert "\n" not in str(refused.value)
    open_shards(str(folder), "val")  # the other split is whole


def test_a_changed_token_is_found_by_its_checksum(folder: Path) -> None:
    damage(folder / "train-000-00000.bin", "one bit")
    open_shards(str(folder), "train")  # which is meant to be quick
    with pytest.raises(DataError, match=r"train-000-00000\.bin.*not those that were written"):
        verify_shards(folder, read_index(folder))


def test_a_shard_of_another_place_or_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "val-000-00000.bin", folder / "train-000-00001.bin")
    with pytest.raises(DataError, match=r"train-000-00001\.bin is not.*split is 'val'"):
        open_shards(str(folder), "train")
    other = write_folder(tmp_path / "other", replace(STAMP, tokenizer_fingerprint="cd" * 32))
    shutil.copy(other / "train-000-00001.bin", folder / "train-000-00001.bin")
    with pytest.raises(
        DataError, match=r"train-000-00001\.bin is not.*tokenizer_fingerprint is 'c"
    ):
        open_shards(str(folder), "train")


def test_a_shard_that_nobody_listed_is_named(folder: Path) -> None:
    shutil.copy(folder / "train-000-00001.bin", folder / "train-000-00002.bin")
    with pytest.raises(DataError, match=r"train-000-00002\.bin is not listed"):
        verify_shards(folder, read_index(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "written by a newer nsa"),
        ({"stamp": {}}, "is damaged"),
        ({"shards": None}, "is damaged"),
    ],
)
def test_an_index_that_cannot_be_read_is_named(folder: Path, change: dict, said: str) -> None:
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**content, **change}))
    with pytest.raises(DataError, match=rf"index\.json.*{said}"):
        open_shards(str(folder), "train")


def test_a_shard_replaced_by_another_file_leaves_an_open_store_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    store = open_shards(str(folder), "train")
    before = store.read(0, 11).copy()
    other = write_folder(tmp_path / "other", replace(STAMP, eos_id=7))
    for name in LENGTHS:
        (other / name).replace(folder / name)
    assert np.array_equal(store.read(0, 11), before)
    with pytest.raises(DataError, match=r"train-000-00000\.bin is not the shard"):
        open_shards(str(folder), "train")


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


@pytest.mark.parametrize("how", ["cut", "overwritten"])
def test_a_shard_that_is_written_to_while_in_use_is_refused_not_a_crash(
    folder: Path, how: str
) -> None:
    path = folder / "train-000-00000.bin"
    with subprocess.Popen(
        [sys.executable, "-c", READ_WHILE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        if how == "cut":
            os.truncate(path, 0)
        else:
            with path.open("r+b") as file:
                file.seek(HEADER)
                file.write(b"\1\0" * 9)
        said, _ = process.communicate("go on\n")
    assert process.returncode == 0
    assert said.startswith(f"DataError {path}: overwritten or cut while in use")


def test_a_failed_write_leaves_no_draft_and_the_file_that_was_there(folder: Path) -> None:
    name = "train-000-00000.bin"
    (folder / "sub").mkdir()  # nothing can be moved into its place
    before = {path.name: path.is_dir() or path.read_bytes() for path in folder.iterdir()}
    long = replace(STAMP, source="/long" * 1_000)
    with pytest.raises(DataError, match=r"header has no room.*shorter paths"):
        write_shard(folder, name, "train", long, documents(name), 20)
    with pytest.raises(IsADirectoryError):
        write_shard(folder, "sub", "train", STAMP, documents(name), 20)
    assert {path.name: path.is_dir() or path.read_bytes() for path in folder.iterdir()} == before


def test_whoever_has_a_file_open_while_it_is_written_again_reads_the_old_one(folder: Path) -> None:
    before = (folder / INDEX).read_bytes()
    with (folder / INDEX).open("rb") as file:
        write_index(folder, replace(read_index(folder), parts=7))
        assert file.read() == before
    assert read_index(folder).parts == 7
