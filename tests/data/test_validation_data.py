"""Validation data: the same samples on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nsa.constants import IGNORE_INDEX
from nsa.data.cache import TokenCache, ValidationData
from nsa.data.config import DataConfig
from nsa.data.dataset import OpenedSource, open_dataset
from nsa.data.writer import prepare
from tests.data.texts import configure, split, texts, write_lines


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
        monkeypatch.setattr(OpenedSource, "is_small", False)
    return str(request.param)


@pytest.mark.parametrize("packing", ["concat", "documents"])
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


@pytest.mark.usefixtures("kind")
def test_validation_reads_only_documents_that_training_does_not(
    source: str, validation_of: Callable[..., ValidationData]
) -> None:
    _, documents = split(texts(200))
    stream = b"\n".join(documents)
    validation = validation_of(configure(source), 20)
    for sample in evaluated(validation, 1, 1):
        for text in bytes(min(token, 255) for token in sample[:16]).split(b"\xff"):
            assert text in stream
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


@pytest.mark.parametrize("ranks", [1, 4])
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
    assert f"ends after {available} sequences" in note
