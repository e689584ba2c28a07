"""Batch loader: order, resumption, and prompt errors when batches stop."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import Empty
from threading import Event, Timer
from typing import Any

import numpy as np
import pytest
import torch

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import open_samples
from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.files import open_files
from nsa.data.loader import BatchLoader, Prefetcher, open_loader
from nsa.data.prepare import prepare
from nsa.data.source import DataError
from nsa.data.tokenizer import train_tokenizer
from tests.data.processes import ends_soon, workers_of
from tests.data.texts import (
    EOS,
    Rows,
    configure,
    split,
    texts,
    write_lines,
    write_parquet,
    write_to_pipe,
)
from tests.ranks import spawn_ranks

STREAMING_RUN = Path(__file__).parent / "streaming_run.py"


def loader_of(
    config: DataConfig, *, rank: int = 0, world_size: int = 1, **settings: Any
) -> BatchLoader:
    shape = {"micro_batch": 2, "accumulation": 1, "seed": 3} | settings
    return open_loader(open_dataset(config), rank=rank, world_size=world_size, **shape)


def read(loader: BatchLoader, count: int) -> list[list[list[int]]]:
    return [loader.next_batch().input_ids.tolist() for _ in range(count)]


def wait_for_first_batch(loader: BatchLoader) -> None:
    """So that a short timeout does not include the worker's start."""
    deadline = time.monotonic() + 60
    while loader.first_seconds is None:
        assert time.monotonic() < deadline, "no batch in 60 seconds"
        time.sleep(0.05)


def test_indexed_batches_come_in_order_and_need_no_state() -> None:
    config = configure("synthetic")
    shape = {"micro_batch": 2, "accumulation": 3, "world_size": 2, "seed": 3}
    samples = open_samples(open_dataset(config), "train", seed=3)
    assert samples is not None
    with closing(open_loader(open_dataset(config), rank=1, consumed=24, **shape)) as loader:
        for consumed in (24, 36):
            for micro_step in range(3):
                first = consumed + micro_step * 4 + 2  # rank 0's two samples come first
                expected = samples.batch([first, first + 1])
                batch = loader.next_batch()
                assert torch.equal(batch.input_ids, expected.input_ids)
                assert torch.equal(batch.labels, expected.labels)
        assert loader.state() is None
        assert loader.source.fingerprint == samples.fingerprint
        assert loader.samples_per_step == 12
        assert not workers_of(os.getpid())


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_streaming_batches_are_the_rows_of_the_ranks_part(source: str, packing: str) -> None:
    config = configure(source, packing=packing)
    stream = Rows(config, seed=3, part=1, parts=2, rows=2)
    with closing(loader_of(config, rank=1, world_size=2)) as loader:
        for _ in range(30):
            rows = next(stream).astype(np.int64)
            batch = loader.next_batch()
            assert batch.input_ids.flatten().tolist() == rows[:, :-1].flatten().tolist()
            labels = rows[:, 1:].copy()
            if packing == "documents":
                labels[rows[:, :-1] == EOS] = IGNORE_INDEX
            assert batch.labels.flatten().tolist() == labels.flatten().tolist()
        assert loader.first_seconds is not None
        assert loader.first_seconds > 0


@pytest.mark.parametrize(
    ("prefix", "counts"),
    [("", (1, 0, 22, 37)), pytest.param("hf:", (23, 37), marks=pytest.mark.full)],
)
def test_a_loader_resumes_after_the_last_consumed_batch(
    tmp_path: Path, prefix: str, counts: tuple[int, ...]
) -> None:
    for number in range(3):
        write_parquet(tmp_path / f"{number}.parquet", texts(200)[number::3])
    config = configure(f"{prefix}{tmp_path}")
    with closing(loader_of(config)) as uninterrupted:
        expected = read(uninterrupted, 60)
    state, consumed, batches = None, 0, []
    for count in counts:
        with closing(loader_of(config, state=state, consumed=consumed)) as loader:
            batches += read(loader, count)
            state = json.loads(json.dumps(loader.state()))
            consumed += 2 * count
    assert batches == expected


@pytest.mark.parametrize("kills", [(40,), pytest.param((3, 40), marks=pytest.mark.full)])
def test_a_killed_run_resumes_without_a_lost_or_repeated_row(
    tmp_path: Path, source: str, kills: tuple[int, ...]
) -> None:
    log, steps = tmp_path / "rows.txt", 90
    arguments = (source, str(tmp_path), str(steps), "7")
    for kill_at in kills:
        (run,) = spawn_ranks(STREAMING_RUN, *arguments, str(kill_at), ranks=0).started
        while not log.exists() or log.read_bytes().count(b"\n") < kill_at:
            assert run.wait(0.01) is None, run.text("err")
        workers = workers_of(run.pid)
        run.kill()
        assert run.wait(10) == -signal.SIGKILL
        assert all(ends_soon(worker) for worker in workers)
    finished = spawn_ranks(STREAMING_RUN, *arguments, "0", ranks=0)
    assert finished.codes(60) == [0], finished.text("err")
    with closing(loader_of(configure(source), rank=1, world_size=2)) as uninterrupted:
        expected = [str(rows) for rows in read(uninterrupted, steps)]
    assert log.read_text().splitlines() == expected


def test_the_error_of_a_killed_worker_names_its_source_and_rank(source: str) -> None:
    with closing(loader_of(configure(source), rank=0)) as loader:
        loader.next_batch()
        os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
        message = r"a\.jsonl', rank 0: .*SIGKILL"
        with pytest.raises(DataError, match=message):
            read(loader, 10_000)
        with pytest.raises(DataError, match=message):  # and again, instead of a later batch
            loader.next_batch()


def test_the_timeout_of_a_hanging_source_names_its_rank_and_last_document(
    pipe: tuple[str, Any],
) -> None:
    name, writer = pipe
    train, _ = split([b"%d" % number for number in range(3_000)])
    write_to_pipe(writer, train[:1_200])  # more than a block
    with closing(loader_of(configure(name, timeout=1.5))) as loader:
        wait_for_first_batch(loader)
        with pytest.raises(DataError) as raised:
            read(loader, 1_000)
        message = str(raised.value)
        for part in (name, "rank 0", "1.5 seconds", "slow.jsonl:1200", "data.timeout", "prepare"):
            assert part in message
        # What arrives late is still read in order.
        write_to_pipe(writer, train[1_200:])
        assert loader.next_batch().input_ids.shape == (2, 16)


def test_the_timeout_names_the_hanging_source_of_a_mixture(
    pipe: tuple[str, Any], source: str
) -> None:
    name, _ = pipe
    with closing(loader_of(configure({name: 0.1, source: 0.9}, timeout=1.5))) as loader:
        wait_for_first_batch(loader)
        with pytest.raises(
            DataError, match=r"data\.source = '[^']*slow\.jsonl': rank 0 .*none yet"
        ):
            read(loader, 100)


def test_the_error_of_a_broken_document_passes_through(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, texts(30))
    with path.open("a") as lines:
        lines.write("{broken\n")
    with (
        closing(loader_of(configure(str(path)))) as loader,
        pytest.raises(DataError, match=r"a\.jsonl:31: not a line of JSON"),
    ):
        read(loader, 1_000)


def test_a_prefetcher_is_a_bounded_number_of_items_ahead() -> None:
    begun: list[int] = []

    def items() -> Iterator[int]:
        for number in range(9):
            begun.append(number)
            yield number
        raise DataError("broken")

    prefetcher = Prefetcher(items(), 3, lambda: None)
    with closing(prefetcher):
        for number in range(9):
            assert prefetcher.next(60) == number
            assert begun[number] == number
            assert len(begun) <= number + 1 + 3
        for _ in range(2):
            with pytest.raises(DataError, match="broken"):
                prefetcher.next(60)


def test_a_wait_for_items_ends_without_progress_and_not_with_it() -> None:
    ready = Event()

    def items() -> Iterator[str]:
        ready.wait()
        yield "item"

    with closing(Prefetcher(items(), 1, ready.set)) as prefetcher:
        with pytest.raises(Empty):
            prefetcher.next(0.2)
        progress = iter([0.0, *[time.monotonic() + 0.3] * 3])
        Timer(0.25, ready.set).start()
        assert prefetcher.next(0.2, lambda: next(progress, time.monotonic())) == "item"


def test_an_unexpected_error_while_prefetching_is_a_data_error_with_its_cause() -> None:
    with closing(Prefetcher(map(int, ["1", "x"]), 2, lambda: None)) as prefetcher:
        assert prefetcher.next(60) == 1
        with pytest.raises(DataError, match="prefetching failed: ValueError: invalid") as raised:
            prefetcher.next(60)
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_process_ends_with_open_loaders(source: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom nsa.data.config import DataConfig\n"
        "from nsa.data.dataset import open_dataset\n"
        "from nsa.data.loader import open_loader\n"
        "from nsa.data.validation_data import ValidationData\n"
        "shape = {'micro_batch': 1, 'world_size': 1}\n"
        "config = DataConfig(source=sys.argv[1], seq_len=16, held_out=0.2)\n"
        "datasets = [open_dataset(config), open_dataset(DataConfig(seq_len=16))]\n"
        "step = {'rank': 0, 'accumulation': 1, 'seed': 1}\n"
        "loader, indexed = [open_loader(one, **shape, **step) for one in datasets]\n"
        "validation = ValidationData(datasets[0], sequences=3, **shape)\n"
        "for each in (loader, indexed): each.next_batch()\n"
    )
    run = spawn_ranks(program, source, ranks=0)
    assert (run.codes(60), run.text("err")) == ([0], "")


def test_close_ends_the_workers_and_may_be_called_twice(source: str) -> None:
    loader = loader_of(configure(source))
    workers = workers_of(os.getpid())
    assert len(workers) == 1
    for _ in range(2):
        loader.close()
    assert all(ends_soon(worker) for worker in workers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 2}, r"number of ranks = 2: .*saved with 1.*prepare"),
        ({"seed": 4}, r"train\.seed = 4: .*saved with 3"),
    ],
)
def test_the_state_of_a_different_stream_is_refused_by_name(
    source: str, change: dict[str, int], message: str
) -> None:
    with closing(loader_of(configure(source))) as loader:
        loader.next_batch()
        state = loader.state()
    with pytest.raises(DataError, match=message):
        loader_of(configure(source), state=state, consumed=2, **change)


def test_cursors_of_several_workers_or_another_block_of_earlier_versions_are_refused(
    source: str,
) -> None:
    with closing(loader_of(configure(source))) as loader:
        loader.next_batch()
        state = loader.state()
    assert state is not None
    several = state | {"workers": state["workers"] * 2}
    with pytest.raises(
        DataError, match=r"data\.workers = 1: .*saved with 2, .* version that saved"
    ):
        loader_of(configure(source), state=several, consumed=2)
    other = state | {"under": state["under"] | {"data.shuffle_documents": 8}}
    with pytest.raises(DataError, match=r"data\.shuffle_documents = 1000: .*saved with 8"):
        loader_of(configure(source), state=other, consumed=2)


def test_a_small_stream_that_is_read_many_times_is_warned_about(source: str) -> None:
    size = Path(source).stat().st_size
    with closing(loader_of(configure(source))) as loader:
        (line, warning) = loader.source.describe(10 * size // 16)
        assert line.endswith(f": at least 10.00 epochs of {size:,} bytes")
        assert warning.startswith(f"WARNING: {source}: {size:,} bytes, 10 epochs: ")
        assert len(loader.source.describe(4 * size // 16)) == 1


def test_each_stream_of_a_mixture_is_described_by_its_fraction_of_the_samples(
    source: str, tmp_path: Path
) -> None:
    other = write_lines(tmp_path / "b.jsonl", texts(100))
    with closing(loader_of(configure({source: 3.0, other: 1.0}))) as loader:
        lines = loader.source.describe(400)
    for line, name, samples in zip(lines, (source, other), (300, 100), strict=True):
        size = Path(name).stat().st_size
        assert line.startswith(f"{name}: streamed, tokenizer byte, documents shuffled 1,000 at a")
        assert f"consumes {samples} samples of 16" in line
        assert line.endswith(f"at least {samples * 16 / size:.2f} epochs of {size:,} bytes")


def test_a_resumed_stream_without_a_saved_cursor_is_refused(source: str) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl' is streamed, and no cursor .* rank 0"):
        loader_of(configure(source), consumed=2)


def test_a_mixture_of_streams_and_indexed_tokens_is_refused_by_name(source: str) -> None:
    message = r"streams \(.*a\.jsonl\) .* indexed tokens \(embedded\).*nsa data prepare"
    with pytest.raises(DataError, match=message):
        loader_of(configure({source: 1.0, "embedded": 2.0}))


def test_shards_of_different_tokenizers_are_not_mixed(tmp_path: Path, source: str) -> None:
    train_tokenizer(open_files(Path(source), "text"), 300, tmp_path / "bpe")
    folders = {}
    for name, tokenizer in (("bytes", "byte"), ("bpe_shards", f"hf:{tmp_path / 'bpe'}")):
        config = configure(source, tokenizer=tokenizer)
        prepare(config, tmp_path / name, workers=1, progress=False)
        folders[str(tmp_path / name)] = 1.0
    with pytest.raises(DataError, match=r"bytes.*bpe_shards.*different tokenizers"):
        loader_of(configure(folders))
    with closing(loader_of(configure(next(iter(folders))))) as loader:
        assert loader.next_batch().input_ids.shape == (2, 16)


@pytest.mark.gpu
def test_batches_can_be_pinned() -> None:
    with closing(loader_of(configure("synthetic"))) as loader:
        assert loader.next_batch().pin_memory().input_ids.is_pinned()
