"""Validation data: the same samples on any number of ranks, and errors that name the source."""

from __future__ import annotations

import fcntl
import struct
import termios
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from nsa.constants import IGNORE_INDEX
from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.source import DataError
from nsa.data.validation_data import ValidationData
from nsa.data.worker import Worker
from tests.data.texts import configure, split, texts, write_lines, write_to_pipe


def validation_of(
    config: DataConfig, sequences: int, micro_batch: int = 1, world_size: int = 1
) -> ValidationData:
    shape = {"micro_batch": micro_batch, "world_size": world_size}
    return ValidationData(open_dataset(config), sequences=sequences, **shape)


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


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("kind", ["synthetic", "stream"])
def test_validation_samples_do_not_depend_on_ranks_or_micro_batch(
    source: str, kind: str, packing: str
) -> None:
    name = source if kind == "stream" else "synthetic"
    config = configure(name, packing=packing)
    expected: list[tuple[int, ...]] = []
    for ranks, micro_batch in ((1, 1), (2, 3), (5, 2)):
        validation = validation_of(config, 13, micro_batch, ranks)
        samples = evaluated(validation, ranks, micro_batch)
        assert validation.note is None
        expected = expected or samples
        assert len(set(expected)) == 13
        assert samples == expected


def test_validation_reads_only_documents_that_training_does_not(source: str) -> None:
    _, documents = split(texts(200))
    stream = b"\n".join(documents)
    validation = validation_of(configure(source), 20)
    for sample in evaluated(validation, 1, 1):
        for text in bytes(min(token, 255) for token in sample[:16]).split(b"\xff"):
            assert text in stream
    assert validation.bytes_per_token == pytest.approx(0.97, abs=0.02)


@pytest.mark.parametrize("ranks", [1, 4])
def test_validation_reports_fewer_samples_than_requested(tmp_path: Path, ranks: int) -> None:
    train, documents = split(texts(200))
    source = write_lines(tmp_path / "b.jsonl", train[:40] + documents[:3])
    available = (sum(len(text) + 1 for text in documents[:3]) - 1) // 16
    assert available > 0
    validation = validation_of(configure(source), 50, 2, ranks)
    assert len(evaluated(validation, ranks, 2)) == validation.sequences == available
    assert validation.note is not None
    assert f"ends after {available} sequences" in validation.note


@pytest.fixture
def started(pipe: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set once the worker has read the pipe: a short timeout must not include its start."""
    event, (_, writer) = Event(), pipe

    class Started(Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            deadline = time.monotonic() + 60
            while struct.unpack("i", fcntl.ioctl(writer, termios.FIONREAD, bytes(4))) != (0,):
                assert time.monotonic() < deadline, "nothing read in 60 seconds"
                time.sleep(0.05)
            event.set()

    monkeypatch.setattr("nsa.data.validation_data.Worker", Started)
    return event


def test_validation_waits_while_its_source_yields_documents(
    pipe: tuple[str, Any], started: Event
) -> None:
    name, writer = pipe
    train, documents = split(texts(200))
    seconds = 3.0
    write_to_pipe(writer, train[:1])

    def write_slowly() -> None:
        started.wait()
        for number, text in enumerate([*train[1:20], *documents]):
            write_to_pipe(writer, [text])
            time.sleep(seconds / 12 if number < 14 else 0)

    writing = Thread(target=write_slowly, daemon=True)
    writing.start()
    assert validation_of(configure(name, timeout=seconds), 9).sequences == 9
    writing.join()


def test_the_timeout_of_validation_names_the_hanging_source(
    pipe: tuple[str, Any], started: Event
) -> None:
    name, writer = pipe
    write_to_pipe(writer, texts(5))
    with pytest.raises(DataError, match=r"slow\.jsonl': no document .* 3 sec.*slow\.jsonl:5"):
        validation_of(configure(name, timeout=3), 50)
    assert started.is_set()


@pytest.mark.parametrize("kind", ["synthetic", "stream"])
def test_an_empty_validation_split_is_refused_when_it_is_opened(kind: str, tmp_path: Path) -> None:
    many = write_lines(tmp_path / "many.jsonl", texts(1_001))  # of fewer, each ends in validation
    name = many if kind == "stream" else "synthetic"
    with pytest.raises(DataError, match=r"no document for split 'val'; raise data\.held_out"):
        validation_of(configure(name, held_out=1e-9), 3)
