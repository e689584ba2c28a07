"""Token streams: their content and order, and exact resumption."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.source import DataError
from nsa.data.stream import SHUFFLE_DOCUMENTS
from tests.data.texts import (
    EOS,
    HELD_OUT,
    Rows,
    documents_in,
    split,
    text,
    texts,
    tokens_of,
    write_lines,
    write_parquet,
)


def stream(
    source: Any,
    *,
    seed: int = 1,
    part: int = 0,
    parts: int = 1,
    rows: int = 1,
    state: Any = None,
    block: int = SHUFFLE_DOCUMENTS,
    on_document: Any = lambda source, location: None,
) -> Rows:
    config = DataConfig(source=source, held_out=HELD_OUT, seq_len=16)
    return Rows(
        config,
        seed=seed,
        part=part,
        parts=parts,
        rows=rows,
        state=state,
        block=block,
        on_document=on_document,
    )


def read(packed: Rows, count: int) -> np.ndarray:
    return np.stack([next(packed) for _ in range(count)])


def passes(packed: Rows, count: int = 1) -> list[list[bytes]]:
    """The documents of the first passes; a repeated document starts the next pass."""
    rows: list[np.ndarray] = []
    while True:
        rows.append(read(packed, 20).reshape(-1, 17))
        result: list[list[bytes]] = [[]]
        for document in documents_in(tokens_of(rows)):
            if document in result[-1]:
                result.append([])
            result[-1].append(document)
        if len(result) > count:
            return result[:count]


def test_rows_are_windows_of_the_documents_with_eos_after_each(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(40))
    train, _ = split(texts(40))
    expected = np.concatenate([[*one, EOS] for one in train])
    packed = stream(source, rows=3, block=1)
    count = (len(expected) - 1) // 16 // 3
    rows = read(packed, count).reshape(-1, 17)
    for number, row in enumerate(rows):
        assert np.array_equal(row, expected[number * 16 : number * 16 + 17])
    assert count > 10


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("files", [1, 3])
def test_parts_together_read_each_training_document_once_a_pass(
    tmp_path: Path, parts: int, files: int
) -> None:
    documents = texts(120)
    for number in range(files):
        write_lines(tmp_path / f"{number}.jsonl", documents[number::files])
    train, _ = split(documents)
    counts: Counter[bytes] = Counter()
    for part in range(parts):
        counts.update(passes(stream(str(tmp_path), part=part, parts=parts, block=7))[0])
    assert counts == Counter(train)


def test_each_pass_and_each_seed_shuffles_blocks_differently(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(120))
    train, _ = split(texts(120))
    block = 10
    first, second = passes(stream(source, block=block), 2)
    (other,) = passes(stream(source, block=block, seed=2))
    assert first != second
    assert first != other
    for start in range(0, len(train), block):
        rows = slice(start, start + block)
        assert sorted(first[rows]) == sorted(second[rows]) == sorted(train[rows])
    for start in range(0, len(train) - block, block):  # the last one is short
        rows = slice(start, start + block)
        assert first[rows] != train[rows]
    assert passes(stream(source, block=1))[0] == train


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=30),
    block=st.integers(1, 12),
    parts=st.integers(1, 3),
    rows=st.integers(1, 3),
    before=st.integers(0, 40),
    after=st.integers(1, 12),
    write=st.sampled_from([write_lines, write_parquet]),
)
def test_a_stream_resumes_exactly_after_any_batch(
    tmp_path: Path,
    lengths: list[int],
    block: int,
    parts: int,
    rows: int,
    before: int,
    after: int,
    write: Any,
) -> None:
    always = [b"one for each part, %d" % number for number in range(20)]
    documents = [text(number, length) for number, length in enumerate(lengths)]
    source = write(
        tmp_path / f"a.{'jsonl' if write is write_lines else 'parquet'}", always + documents
    )
    same = {"parts": parts, "part": parts - 1, "rows": rows, "block": block}
    undisturbed = stream(source, **same)
    for _ in range(before):
        next(undisturbed)
    state = json.loads(json.dumps(undisturbed.state()))
    restored = stream(source, state=state, **same)
    assert restored.state() == undisturbed.state()
    assert np.array_equal(read(restored, after), read(undisturbed, after))
    assert restored.state() == undisturbed.state()


def test_a_resumed_stream_reads_one_block_again_and_saves_no_text(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(3_000))
    packed = stream(source, block=50)
    read(packed, 3_000)
    state = packed.state()
    assert state["sources"][source]["block"] > 10
    assert len(json.dumps(state)) < 1_000
    locations: list[str] = []
    next(
        stream(
            source,
            block=50,
            state=state,
            on_document=lambda _, location: locations.append(location),
        )
    )
    assert len(locations) < 50 / (1 - HELD_OUT) * 1.5


def test_giant_and_empty_documents_are_streamed(tmp_path: Path) -> None:
    giant = b"g" * 3_000_000
    source = write_lines(tmp_path / "a.jsonl", [b"", giant, b"", b"small"])
    config = DataConfig(source=source, held_out=1e-9, seq_len=1_000)
    packed = Rows(config, seed=1, part=0, parts=1, rows=500, block=1)
    rows = [next(packed) for _ in range(13)]
    start = giant[: -int(len(giant) * open_dataset(config).sources[0].division.fraction)]
    assert documents_in(tokens_of(rows))[:4] == [start, b"small", start, b"small"]


def test_a_mixture_gives_each_source_its_fraction_of_the_rows(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", [b"a" * 50 + b"%d" % number for number in range(50)])
    b = write_lines(tmp_path / "b.jsonl", [b"b" * 50 + b"%d" % number for number in range(50)])
    for part in range(2):
        packed = stream({a: 3.0, b: 1.0}, part=part, parts=2, rows=4, block=5)
        rows = read(packed, 25).reshape(100, 17)
        in_b = [(row == ord("b")).any() for row in rows]
        assert sum(in_b) == 25
        assert not any(
            (row == ord("a")).any() for row, from_b in zip(rows, in_b, strict=True) if from_b
        )
        state = json.loads(json.dumps(packed.state()))
        restored = stream({a: 3.0, b: 1.0}, part=part, parts=2, rows=4, block=5, state=state)
        assert np.array_equal(read(restored, 10), read(packed, 10))


def test_a_part_without_a_document_is_refused_with_the_fix(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", split(texts(30))[0][:2])
    for part in range(2):
        next(stream(source, part=part, parts=3))
    with pytest.raises(
        DataError, match=r"a\.jsonl'.* part 3 of 3 .*lower the number of ranks.*prepare"
    ):
        next(stream(source, part=2, parts=3))
    validation = write_lines(tmp_path / "b.jsonl", split(texts(200))[1])
    with pytest.raises(DataError, match=r"b\.jsonl': holds no document to train on"):
        next(stream(validation))


def test_validation_tokens_are_the_first_of_the_source_and_as_many_as_requested(
    tmp_path: Path,
) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(400))
    _, validation = split(texts(400))
    config = DataConfig(source=source, held_out=HELD_OUT)
    locations: list[str] = []
    dataset = open_dataset(config)
    (store,) = dataset.stores("val", 300, lambda _, location: locations.append(location))
    documents = documents_in(store.read(0, len(store)))
    assert documents == validation[: len(documents)]
    assert 300 <= len(store) < 300 + 61
    assert len(locations) < 200  # reading stops once there is enough
    text_bytes = sum(map(len, documents))
    assert store.bytes_per_token == pytest.approx(text_bytes / (text_bytes + len(documents)))
    (everything,) = dataset.stores("val", 10**9)
    assert documents_in(everything.read(0, len(everything))) == validation
