"""Datasets of others: indexes, shards, and text files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa.data.files import open_files
from nsa.data.shards import INDEX, Index, open_shards, write_index, write_shard
from nsa.data.source import DataError
from tests.data.test_shards import STAMP, write_folder
from tests.fuzz.hostile import damaged, files, run, time_limit

SHARD = "train-000-00000.bin"


def check(folder: Path) -> None:
    """Check a prepared folder, and read it as training does."""
    run("data", "check", folder)
    with time_limit():
        for split in ("train", "val"):
            with contextlib.suppress(DataError):
                store = open_shards(str(folder), split)
                tokens = store.read(0, len(store))
                assert tokens.max() < store.stamp.vocab_size


def test_any_index_is_read_or_refused_in_one_line(
    fuzz_file: Callable[..., None], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "prepared")
    tree = json.loads((folder / INDEX).read_text())
    fuzz_file(folder / INDEX, 30, files(tree), partial(check, folder))


def test_any_shard_is_read_or_refused_in_one_line(
    fuzz_file: Callable[..., None], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "prepared")
    contents = damaged((folder / SHARD).read_bytes())
    fuzz_file(folder / SHARD, 20, contents, partial(check, folder))


def test_tokens_outside_the_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    """With right checksums. They would fail inside the embedding, on a GPU without a name."""
    stamp = replace(STAMP, vocab_size=100, eos_id=99)
    folder = tmp_path / "prepared"
    folder.mkdir()
    tokens = np.array([5, 100, 99], np.uint16)
    shard = write_shard(folder, SHARD, "train", stamp, [tokens], 3)
    write_index(folder, Index(stamp, {}, [shard]))
    message = r"prepared/train-000-00000\.bin: holds the id 100 at or after token 0, and"
    with pytest.raises(DataError, match=message):
        open_shards(str(folder), "train").read(0, 3)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_any_text_file_is_read_or_refused_by_name(
    fuzz_file: Callable[..., None], suffix: str, tmp_path: Path
) -> None:
    """The error names the file, wherever it is broken."""
    path, texts = tmp_path / f"text{suffix}", [f"text {number} of several" for number in range(200)]
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        with pa.output_stream(str(path), compression="detect") as stream:
            stream.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())

    def read() -> None:
        error = str(path)
        with time_limit():
            try:
                source = open_files(path, "text")
                source.size()
                list(source.read())
            except DataError as raised:
                error = str(raised)
        assert str(path) in error

    fuzz_file(path, 15, damaged(path.read_bytes()), read)


@pytest.mark.parametrize("name", [INDEX, SHARD])
def test_a_pipe_does_not_block(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "prepared")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    check(folder)
    assert run("data", "check", folder) == 2


def test_a_shard_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "prepared")
    other = write_folder(tmp_path / "other")
    tree = json.loads((folder / INDEX).read_text())
    tree["shards"][0]["name"] = f"../{other.name}/train-000-00000.bin"
    (folder / INDEX).write_text(json.dumps(tree))
    digest = hashlib.sha256((other / SHARD).read_bytes()).hexdigest()
    assert tree["shards"][0]["sha256"] == digest, "its content would be right"
    with pytest.raises(DataError, match=r"damaged .*\.\./other/train"):
        open_shards(str(folder), "train")
