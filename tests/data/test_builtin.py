"""Built-in sources: which documents they hold, and that these never change."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from nsa.data.builtin import embedded, synthetic
from nsa.data.config import DataConfig
from nsa.data.factory import open_source, open_store
from nsa.data.source import DataError, Source, is_validation


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


def test_files_are_sorted_by_path_without_those_that_distributions_change(
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
    (tmp_path / "json/__init__.py").write_text("")
    assert [document.location for document in embedded(tmp_path).read()] == sorted(kept)
    assert texts(embedded(tmp_path))[0] == b"x = 'abc.py'\n"


def test_a_python_without_sources_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source = 'embedded'.*data\.source = 'synthetic'"):
        embedded(tmp_path)


@pytest.mark.parametrize("size", [1, 999, 50_000])
def test_synthetic_text_has_the_requested_size_and_is_deterministic(size: int) -> None:
    documents = texts(synthetic(size))
    assert sum(map(len, documents)) == size
    assert texts(synthetic(size)) == documents


def test_synthetic_documents_vary_in_length_and_repeat_their_own_words() -> None:
    documents = texts(synthetic(50_000))
    lengths = [len(document) for document in documents]
    assert max(lengths) > 4 * min(lengths)
    lexicon = set(b" ".join(documents).split())
    assert len(set(max(documents, key=len).split())) <= 32 < len(lexicon)


@pytest.mark.parametrize("count", [1, 3, 1_000])
def test_parts_together_hold_every_document_once(count: int) -> None:
    source = open_source(DataConfig(synthetic_bytes=20_000), "synthetic")
    parts = [texts(source.part(index, count)) for index in range(count)]
    assert sorted(chain(*parts)) == sorted(texts(source))


def test_a_pass_resumes_after_any_document() -> None:
    source = synthetic(20_000).part(1, 3)
    expected = texts(source)
    reader = source.read()
    for count in range(len(expected)):
        state = json.loads(json.dumps(reader.state()))
        assert [document.text for document in source.read(state)] == expected[count:]
        assert next(reader).text == expected[count]
    assert list(source.read(reader.state())) == []


def test_validation_gets_a_fraction_of_the_documents_by_hash() -> None:
    documents = [f"document {number}".encode() for number in range(20_000)]
    selected = [document for document in documents if is_validation(document, 0.05)]
    assert len(selected) == pytest.approx(1_000, abs=4 * (20_000 * 0.05 * 0.95) ** 0.5)
    assert [is_validation(document, 0.05) for document in selected] == [True] * len(selected)
    more = {document for document in documents if is_validation(document, 0.1)}
    assert set(selected) < more, "a larger fraction includes the documents of a smaller one"
