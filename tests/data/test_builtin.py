"""Text that is always at hand: which documents there are, and that they never change."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from nsa.data.builtin import embedded, synthetic
from nsa.data.config import DataConfig
from nsa.data.factory import open_source, open_store
from nsa.data.source import DataError, Source, held_out


def texts(source: Source) -> list[bytes]:
    return [document.text for document in source.read()]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"x = {name!r}\n")


def test_the_standard_library_is_enough_to_train_and_validate_on() -> None:
    train, val = (open_store(DataConfig(), "embedded", split) for split in ("train", "val"))
    assert train is not None
    assert val is not None
    assert len(train) > 4_000_000
    assert len(val) > 64 * 2_048


def test_files_come_sorted_by_path_and_without_what_distributions_differ_in(
    tmp_path: Path,
) -> None:
    kept = ["abc.py", "json/decoder.py", "json/encoder.py", "zipfile/sub/tests.py", "zlib.py"]
    dropped = [
        "site-packages/torch/nn.py",
        "test/test_abc.py",
        "json/tests/test_json.py",
        "unittest/test/dummy.py",
        "idlelib/run.py",
        "encodings/cp437.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "notes.txt",
    ]
    touch(tmp_path, *reversed(kept), *dropped)
    (tmp_path / "json/__init__.py").write_text("")  # nothing to learn from
    assert [document.place for document in embedded(tmp_path).read()] == sorted(kept)
    assert texts(embedded(tmp_path))[0] == b"x = 'abc.py'\n"


def test_a_python_without_sources_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source = 'embedded'.*data\.source = 'synthetic'"):
        embedded(tmp_path)


@pytest.mark.parametrize("size", [1, 999, 50_000])
def test_synthetic_text_has_the_size_asked_for_and_never_changes(size: int) -> None:
    documents = texts(synthetic(size))
    assert sum(map(len, documents)) == size
    assert texts(synthetic(size)) == documents


def test_synthetic_documents_vary_in_length_and_keep_to_words_of_their_own() -> None:
    documents = texts(synthetic(50_000))
    lengths = [len(document) for document in documents]
    assert max(lengths) > 4 * min(lengths)
    lexicon = set(b" ".join(documents).split())
    assert len(set(max(documents, key=len).split())) <= 32 < len(lexicon)


@pytest.mark.parametrize("count", [1, 3, 1_000])
def test_parts_hold_every_document_once(count: int) -> None:
    source = open_source(DataConfig(synthetic_bytes=20_000), "synthetic")
    parts = [texts(source.part(index, count)) for index in range(count)]
    assert sorted(chain(*parts)) == sorted(texts(source))


def test_a_pass_goes_on_where_another_one_stood() -> None:
    source = synthetic(20_000).part(1, 3)
    expected = texts(source)
    reader = source.read()
    for given in range(len(expected)):
        state = json.loads(json.dumps(reader.state()))
        assert [document.text for document in source.read(state)] == expected[given:]
        assert next(reader).text == expected[given]
    assert list(source.read(reader.state())) == []


def test_a_share_of_the_documents_is_held_out_by_what_they_say() -> None:
    documents = [f"document {number}".encode() for number in range(20_000)]
    chosen = [document for document in documents if held_out(document, 0.05)]
    assert len(chosen) == pytest.approx(1_000, abs=4 * (20_000 * 0.05 * 0.95) ** 0.5)
    assert [held_out(document, 0.05) for document in chosen] == [True] * len(chosen)
    more = {document for document in documents if held_out(document, 0.1)}
    assert set(chosen) < more, "a larger share keeps what a smaller one held out"
