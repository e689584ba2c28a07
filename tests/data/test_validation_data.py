"""Validation data: what is held out, and the same samples on any number of ranks."""

import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.cli import main
from nsa.constants import IGNORE_INDEX
from nsa.data.cache import TokenCache, ValidationData
from nsa.data.config import DataConfig
from nsa.data.dataset import DividedSource, open_dataset
from nsa.data.files import TextFile
from nsa.data.shards import open_shards
from nsa.data.source import DataError, HeldOut
from nsa.data.writer import prepare
from nsa.engine.data import open_data
from nsa.engine.process_group import Ranks
from nsa.engine.run_request import TrainState
from tests.data.texts import (
    HELD_OUT,
    configure,
    documents_of,
    names_of_counted,
    open_store,
    split,
    text,
    texts,
    write_lines,
)
from tests.engine.small import small_request


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_lines(tmp_path / "a.jsonl", texts(200))


@pytest.fixture
def validation_of(tmp_path: Path) -> Iterator[Callable[..., ValidationData]]:
    with ExitStack() as stack:

        def open_validation(
            config: DataConfig, sequences: int, micro_batch: int = 1, world_size: int = 1
        ) -> ValidationData:
            cache = TokenCache(open_dataset(config), tmp_path / "cache")
            stack.callback(cache.close)
            shape = {"micro_batch": micro_batch, "world_size": world_size}
            return ValidationData(cache, sequences=sequences, **shape)

        yield open_validation


def evaluated(validation: ValidationData, ranks: int, micro_batch: int) -> list[tuple[int, ...]]:
    """The samples with labels, of all ranks; each rank has the same number of batches."""
    samples: list[tuple[int, ...]] = []
    of_ranks = [validation.batches(rank) for rank in range(ranks)]
    assert len({len(batches) for batches in of_ranks}) == 1
    for batch in (batch for batches in of_ranks for batch in batches):
        assert batch.input_ids.numel() == micro_batch * 16
        rows = batch.labels.reshape(micro_batch, 16)
        for inputs, labels in zip(batch.input_ids.reshape(micro_batch, 16), rows, strict=True):
            if (labels != IGNORE_INDEX).any():
                samples.append((*inputs.tolist(), *labels.tolist()))
    return samples


@pytest.fixture(params=["small", "growing"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let sources be complete before the first sample, or not."""
    if request.param == "growing":
        monkeypatch.setattr(DividedSource, "is_small", False)
    return str(request.param)


@pytest.mark.parametrize(
    ("packing", "kind"), [("concat", "growing"), ("documents", "small")], indirect=["kind"]
)
@pytest.mark.usefixtures("kind")
def test_validation_samples_do_not_depend_on_ranks_or_micro_batch(
    source: str, packing: str, validation_of: Callable[..., ValidationData]
) -> None:
    config = configure(source, packing=packing)
    expected: list[tuple[int, ...]] = []
    for ranks, micro_batch in ((1, 1), (2, 3), (5, 2)):
        validation = validation_of(config, 13, micro_batch, ranks)
        samples = evaluated(validation, ranks, micro_batch)
        assert validation.notes == []
        expected = expected or samples
        assert len(set(expected)) == 13
        assert samples == expected


def test_every_run_is_evaluated_on_the_same_samples(
    source: str, tmp_path: Path, validation_of: Callable[..., ValidationData]
) -> None:
    """Those of seed 0, whatever train.seed is."""
    config = configure(source)
    with closing(TokenCache(open_dataset(config), tmp_path / "cache")) as cache:
        samples = cache.open_samples("val", 0)
        samples.available(5)
        expected = [samples.batch([number]).input_ids.flatten().tolist() for number in range(5)]
    found = evaluated(validation_of(config, 5), 1, 1)
    assert [[*sample[:16]] for sample in found] == expected


@pytest.mark.usefixtures("kind")
def test_validation_reads_only_documents_that_training_does_not(
    source: str, validation_of: Callable[..., ValidationData]
) -> None:
    _, documents = split(texts(200))
    stream = b"\n".join(documents)
    validation = validation_of(configure(source), 20)
    for sample in evaluated(validation, 1, 1):
        for part in bytes(min(token, 255) for token in sample[:16]).split(b"\xff"):
            assert part in stream
    assert validation.bytes_per_token == pytest.approx(0.97, abs=0.02)


def test_prepared_and_cached_tokens_have_the_same_validation_samples(
    source: str, tmp_path: Path, validation_of: Callable[..., ValidationData]
) -> None:
    prepare(configure(source), tmp_path / "prepared")
    cached, prepared = (
        validation_of(configure(name), 20, 3, 2) for name in (source, str(tmp_path / "prepared"))
    )
    assert evaluated(cached, 2, 3) == evaluated(prepared, 2, 3)
    assert cached.bytes_per_token == prepared.bytes_per_token


@pytest.mark.parametrize(("ranks", "kind"), [(1, "small"), (4, "growing")], indirect=["kind"])
@pytest.mark.usefixtures("kind")
def test_validation_reports_fewer_samples_than_requested(
    tmp_path: Path, ranks: int, validation_of: Callable[..., ValidationData]
) -> None:
    train, documents = split(texts(200))
    source = write_lines(tmp_path / "b.jsonl", train[:40] + documents[:3])
    available = (sum(len(text) + 1 for text in documents[:3]) - 1) // 16
    assert available > 0
    validation = validation_of(configure(source), 50, 2, ranks)
    assert len(evaluated(validation, ranks, 2)) == validation.sequences == available
    (note,) = validation.notes
    of = f"the validation split of {source} has {available} sequences, and all are used"
    assert note.startswith(f"train.eval_samples = 50: {of}; for more take a larger source")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four documents of together 8,000 bytes."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_bytes(text(number, 2_000))
    return folder


def test_a_folder_of_four_documents_is_prepared_and_trained_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    out = tmp_path / "out"
    command = ["data", "prepare", "--source", str(folder), "--tokenizer", "byte", "--out", str(out)]
    assert main(command) == 0
    assert "4 files are read; 1 that are empty, binary or huge are not" in capsys.readouterr().out
    assert main(["data", "check", str(out)]) == 0
    dataset = open_dataset(DataConfig(source=str(out), seq_len=2_048, packing="documents"))
    cache = TokenCache(dataset, tmp_path)
    samples = cache.open_samples("train", 1)
    (batch,) = samples.step(0, rank=1, world_size=2, micro_batch=2)
    assert batch.input_ids.numel() == 2 * 2_048
    assert ValidationData(cache, sequences=1, micro_batch=1, world_size=2).sequences == 1
    for name in ("train", "val"):
        store = open_shards(str(out), name)
        text_bytes = sum(map(len, documents_of(store)))
        assert store.bytes_per_token == pytest.approx(text_bytes / len(store), 1e-9)
    starts, ends = (documents_of(open_shards(str(out), name)) for name in ("train", "val"))
    joined = [start + end for start, end in zip(starts, ends, strict=True)]
    assert sorted(joined) == [text(number, 2_000) for number in range(4)]


def test_a_large_text_holds_out_the_requested_fraction(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(text(0, 1_000_000))
    config = DataConfig(source=str(path))
    (start,), (end,) = (documents_of(open_store(config, name)) for name in ("train", "val"))
    assert start + end == path.read_bytes()
    assert len(end) == 50_000
    for name, part in (("train", start), ("val", end)):
        bytes_per_token = len(part) / (len(part) + 1)  # of this part of the document alone
        assert open_store(config, name).bytes_per_token == pytest.approx(bytes_per_token, 1e-9)
    (source,) = open_dataset(replace(config, held_out=0.005)).sources
    assert source.division.fraction == pytest.approx(16_384 / 1e6, 1e-3)


@pytest.mark.parametrize(("limit", "held_out"), [(25, HELD_OUT), (1_000, 0.001)])
def test_documents_are_few_if_a_hash_is_expected_to_hold_out_fewer_than_five(
    limit: int, held_out: float, tmp_path: Path
) -> None:
    """Or below a thousand; no more documents than the limit are read."""
    for count in (limit - 1, limit):
        source = write_lines(tmp_path / "a.jsonl", texts(count))
        if count == limit:
            with Path(source).open("a") as lines:
                lines.write("{broken\n")
        (opened,) = open_dataset(DataConfig(source=source, held_out=held_out)).sources
        assert opened.division.by_position == (count < limit)


@pytest.mark.parametrize(("size", "small"), [(1 << 24, True), ((1 << 24) + 1, False)])
def test_a_source_of_at_most_16_mib_is_shuffled_as_a_whole(
    size: int, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextFile, "open", Mock(side_effect=AssertionError("read for its size")))
    path = tmp_path / "book.txt"
    path.touch()
    os.truncate(path, size)
    (opened,) = open_dataset(DataConfig(source=str(path))).sources
    assert opened.division.by_position
    assert opened.is_small == small


def test_a_compressed_text_holds_out_as_much_as_the_text_itself(tmp_path: Path) -> None:
    content = text(0, 1_000) * 1_000
    plain, packed = tmp_path / "book.txt", tmp_path / "book.txt.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    config = DataConfig(source={str(packed): 1.0, str(plain): 1.0}, held_out=0.005)
    first, second = open_dataset(config).sources
    assert first.division == second.division


@given(st.text(), st.floats(0, 0.5))
def test_a_document_is_divided_between_two_characters(characters: str, fraction: float) -> None:
    division = HeldOut(fraction, by_position=True)
    start, end = (division.text_for(characters.encode(), name) for name in ("train", "val"))
    assert start.decode() + end.decode() == characters
    assert len(end) <= len(characters.encode()) * fraction + 3


def test_what_earlier_versions_held_out_is_held_out() -> None:
    """A resumed run must not train on it: a character at the border, and a document by its hash."""
    division = HeldOut(0.25, by_position=True)
    assert division.text_for("éé".encode(), "train") == "é".encode()
    assert division.text_for("éé".encode(), "val") == "é".encode()
    by_hash = HeldOut(0.25)
    assert [n for n in range(20) if by_hash.text_for(b"%d" % n, "val")] == [2, 6, 17, 18]


def test_how_a_run_divided_its_documents_is_known_without_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nsa eval` asks that of every run that it compares."""
    monkeypatch.setattr("nsa.data.dataset.Hub", Mock(side_effect=DataError("no network")))
    config = DataConfig(source={str(folder): 0.5, "hf:some/dataset": 0.5})
    assert [x.division.by_position for x in open_dataset(config).sources] == [True, False]


@pytest.mark.parametrize("count", [20, 300])
def test_documents_are_counted_once_for_training_and_validation(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = names_of_counted(monkeypatch)
    source = write_lines(tmp_path / "a.jsonl", texts(count))
    config = small_request("--set=data.seq_len=8").config
    config.data.source, config.train.eval_samples = source, 9_999
    data = open_data(config, Ranks(0, 0, 1), TrainState(), tmp_path / "run")
    data.validation.batches(0)
    data.close()
    assert counted == [source]
    small = f"{source}: is small, so the last 50% of each document is held out for validation"
    assert any(note.startswith(small) for note in data.notes) == (count == 20)
    assert any(note.startswith("train.eval_samples = 9999: ") for note in data.notes)


def test_enough_documents_keep_their_split_and_fingerprints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 documents at data.held_out = 0.2; what a run resumes by may not change."""
    monkeypatch.chdir(tmp_path)
    source = write_lines(Path("a.jsonl"), texts(25))
    config = DataConfig(source=source, held_out=HELD_OUT, seq_len=16)
    prepare(config, Path("out"))
    for name, expected in zip(("train", "val"), split(texts(25)), strict=True):
        assert documents_of(open_shards("out", name)) == expected
    fingerprints = [open_shards("out", name).fingerprint[:16] for name in ("train", "val")]
    assert fingerprints == ["b68995f72d1a8009", "741de986518a5064"]
    monkeypatch.setattr(DividedSource, "is_small", False)
    with closing(TokenCache(open_dataset(config), tmp_path / "cache")) as cache:
        (growing,) = cache.stores("train")
    (folder,) = (tmp_path / "cache").iterdir()
    assert (folder.name, growing.fingerprint) == ("a.jsonl-7fc1ea211fcce881", "80731121c7f9e7aa")
