"""Feeds: the batches of a rank, what happens where none come, and what validation sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from nsa.constants import IGNORE_INDEX
from nsa.data.batch_source import open_batches
from nsa.data.config import DataConfig
from nsa.data.files import open_files
from nsa.data.loader import BatchLoader, open_loader
from nsa.data.prepare import prepare
from nsa.data.source import DataError
from nsa.data.stream import PackedStream
from nsa.data.tokenizer import train_tokenizer
from nsa.data.validation import ValidationData, open_validation
from tests.data.processes import gone, workers_of
from tests.data.texts import EOS, HELD_OUT, documents_in, split, texts, write_lines, write_parquet

TRAINER = Path(__file__).parent / "trainer.py"


def configure(source: Any, **settings: Any) -> DataConfig:
    return DataConfig(
        source=source,
        **{"held_out": HELD_OUT, "seq_len": 16, "shuffle_documents": 8, "timeout": 30} | settings,
    )


def feed(config: DataConfig, *, rank: int = 0, world_size: int = 1, **settings: Any) -> BatchLoader:
    shape = {"micro_batch": 2, "accumulation": 1, "seed": 3} | settings
    return open_loader(config, rank=rank, world_size=world_size, **shape)


def take(fed: BatchLoader, count: int) -> list[list[list[int]]]:
    return [fed.next_batch().input_ids.tolist() for _ in range(count)]


def write(pipe: Any, documents: list[bytes]) -> None:
    for text in documents:
        pipe.write(json.dumps({"text": text.decode()}).encode() + b"\n")
    pipe.flush()


def wait_for_first_batch(fed: BatchLoader) -> None:
    """So that a short time-out does not count the worker's start."""
    end = time.monotonic() + 30
    while fed.first_batch_seconds is None:
        assert time.monotonic() < end, "no batch in 30 seconds"
        time.sleep(0.05)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_lines(tmp_path / "a.jsonl", texts(200))


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A source that gives what is written into it, and then nothing more, without an end."""
    path = tmp_path / "slow.jsonl"
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR), "wb") as writer:
        yield str(path), writer


def test_tokens_that_are_all_there_come_in_their_computed_order_and_need_no_place() -> None:
    config = configure("synthetic", synthetic_bytes=20_000)
    shape = {"micro_batch": 2, "accumulation": 3, "world_size": 2, "seed": 3}
    batches = open_batches(config, "train", **shape)
    assert batches is not None
    with closing(open_loader(config, rank=1, consumed=24, **shape)) as fed:
        for consumed in (24, 36):
            for micro_step in range(3):
                expected = batches.batch(consumed, micro_step, 1)
                batch = fed.next_batch()
                assert torch.equal(batch.input_ids, expected.input_ids)
                assert torch.equal(batch.labels, expected.labels)
        assert fed.state() is None
        assert fed.fingerprint == batches.fingerprint
        assert fed.samples_per_step == 12
        assert not workers_of(os.getpid())


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_streamed_batches_are_the_workers_rows_in_turn(source: str, packing: str) -> None:
    config = configure(source, workers=2, packing=packing)
    streams = [
        PackedStream(config, seed=3, part=part, parts=4, rows=2) for part in (2, 3)
    ]  # those of the second of two ranks
    with closing(feed(config, rank=1, world_size=2)) as fed:
        for number in range(30):
            rows = next(streams[number % 2]).astype(np.int64)
            batch = fed.next_batch()
            assert batch.input_ids.flatten().tolist() == rows[:, :-1].flatten().tolist()
            labels = rows[:, 1:].copy()
            if packing == "documents":
                labels[rows[:, :-1] == EOS] = IGNORE_INDEX
            assert batch.labels.flatten().tolist() == labels.flatten().tolist()
        assert fed.first_batch_seconds is not None
        assert fed.first_batch_seconds > 0


def test_ranks_and_their_workers_share_a_pass_without_overlap_or_gap(source: str) -> None:
    config = configure(source, workers=2)
    train, _ = split(texts(200))
    found: Counter[bytes] = Counter()
    for rank in range(2):
        with closing(feed(config, rank=rank, world_size=2, micro_batch=1)) as fed:
            batches = take(fed, 300)
        for worker in range(2):
            documents = documents_in(np.concatenate([b[0] for b in batches[worker::2]]))
            found.update(documents[: documents.index(documents[0], 1)])  # no pass ends in between
            assert set(documents) <= set(train)
    assert found.keys() == set(train)


@pytest.mark.parametrize(
    ("prefix", "workers", "counts"), [("", 2, (1, 0, 22, 37)), ("hf:", 1, (23, 37))]
)
def test_a_feed_goes_on_behind_the_last_batch_that_was_taken(
    tmp_path: Path, prefix: str, workers: int, counts: tuple[int, ...]
) -> None:
    for number in range(3):
        write_parquet(tmp_path / f"{number}.parquet", texts(200)[number::3])
    config = configure(f"{prefix}{tmp_path}", workers=workers, prefetch=4)
    with closing(feed(config)) as undisturbed:
        expected = take(undisturbed, 60)
    state, consumed, found = None, 0, []
    for count in counts:
        with closing(feed(config, state=state, consumed=consumed)) as fed:
            found += take(fed, count)
            state = json.loads(json.dumps(fed.state()))
            consumed += 2 * count
    assert found == expected


def test_a_run_that_is_killed_goes_on_with_no_row_lost_or_doubled(
    tmp_path: Path, source: str
) -> None:
    log, steps = tmp_path / "rows.txt", 90
    command = [sys.executable, str(TRAINER), source, str(tmp_path), str(steps), "7"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for kill_at in (3, 40):
        run = subprocess.Popen(command, env=environment)
        while run.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < kill_at):
            time.sleep(0.001)
        workers = workers_of(run.pid)
        run.kill()
        run.wait()
        assert all(gone(worker) for worker in workers)
    subprocess.run(command, env=environment, check=True)
    with closing(feed(configure(source, workers=2), rank=1, world_size=2)) as undisturbed:
        expected = [str(rows) for rows in take(undisturbed, steps)]
    assert log.read_text().splitlines() == expected


def test_a_worker_that_is_killed_ends_the_feed_and_is_named(source: str) -> None:
    with closing(feed(configure(source, workers=2), rank=0)) as fed:
        fed.next_batch()
        os.kill(workers_of(os.getpid())[1], signal.SIGKILL)
        message = r"a\.jsonl', rank 0: .*SIGKILL"
        with pytest.raises(DataError, match=message):
            take(fed, 10_000)
        with pytest.raises(DataError, match=message):  # and again: no later batch takes its place
            fed.next_batch()


def test_a_source_that_hangs_is_named_with_its_rank_and_its_last_document(
    pipe: tuple[str, Any],
) -> None:
    name, writer = pipe
    train, _ = split(texts(40))
    write(writer, train[:20])
    with closing(feed(configure(name, timeout=1.5, shuffle_documents=5))) as fed:
        wait_for_first_batch(fed)
        begun = time.monotonic()
        with pytest.raises(DataError) as raised:
            take(fed, 1_000)
        assert 1.5 <= time.monotonic() - begun < 15
        message = str(raised.value)
        for part in (name, "rank 0", "1.5 seconds", "slow.jsonl:20", "data.timeout", "prepare"):
            assert part in message
        # It was the source's fault alone: what comes late still comes in its order.
        write(writer, train[20:])
        assert fed.next_batch().input_ids.shape == (2, 16)


def test_of_a_mixture_the_source_that_hangs_is_named(pipe: tuple[str, Any], source: str) -> None:
    name, _ = pipe
    with closing(feed(configure({name: 0.1, source: 0.9}, timeout=1.5))) as fed:
        wait_for_first_batch(fed)
        with pytest.raises(
            DataError, match=r"data\.source = '[^']*slow\.jsonl': rank 0 .*none yet"
        ):
            take(fed, 100)


def test_a_broken_document_comes_through_as_its_source_named_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, texts(30))
    with path.open("a") as lines:
        lines.write("{broken\n")
    with (
        closing(feed(configure(str(path)))) as fed,
        pytest.raises(DataError, match=r"a\.jsonl:31: not a line of JSON"),
    ):
        take(fed, 1_000)


def test_a_process_ends_though_nobody_closed_its_feed(source: str) -> None:
    program = (
        "import sys\nfrom nsa.data.config import DataConfig\n"
        "from nsa.data.loader import open_loader\nfrom nsa.data.validation import open_validation\n"
        "shape = {'micro_batch': 1, 'world_size': 1}\n"
        "config = DataConfig(source=sys.argv[1], seq_len=16, held_out=0.2)\n"
        "feed = open_loader(config, rank=0, accumulation=1, seed=1, **shape)\n"
        "held_out = open_validation(config, sequences=3, **shape)\n"
        "computed = open_loader(DataConfig(seq_len=16), rank=0, accumulation=1, seed=1, **shape)\n"
        "for each in (feed, computed): each.next_batch()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, source]
    run = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_closing_a_feed_ends_its_workers_and_can_be_done_twice(source: str) -> None:
    fed = feed(configure(source, workers=2))
    held_out = open_validation(configure(source), sequences=5, micro_batch=1, world_size=1)
    workers = workers_of(os.getpid())
    assert len(workers) == 3
    for _ in range(2):
        fed.close()
        held_out.close()
    assert all(gone(worker) for worker in workers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 2}, r"number of ranks = 1, which is now 2.*prepare"),
        ({"workers": 3}, r"data\.workers = 2, which is now 3"),
        ({"shuffle_documents": 9}, r"data\.shuffle_documents = 8, which is now 9"),
        ({"seed": 4}, r"train\.seed = 3, which is now 4"),
    ],
)
def test_a_place_in_another_stream_is_refused_by_name(
    source: str, change: dict[str, int], message: str
) -> None:
    with closing(feed(configure(source, workers=2))) as fed:
        fed.next_batch()
        state = fed.state()
    data = {name: change[name] for name in change.keys() & {"workers", "shuffle_documents"}}
    others = {name: change[name] for name in change.keys() - data.keys()}
    with pytest.raises(DataError, match=message):
        feed(configure(source, **{"workers": 2} | data), state=state, consumed=2, **others)


def test_a_stream_is_not_begun_anew_where_its_place_was_not_saved(source: str) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl' is streamed, and no place .* rank 0"):
        feed(configure(source), consumed=2)


def test_a_mixture_of_streams_and_prepared_tokens_is_refused_by_name(source: str) -> None:
    message = r"streams \(.*a\.jsonl\) .* all there \(embedded\).*nsa data prepare"
    with pytest.raises(DataError, match=message):
        feed(configure({source: 1.0, "embedded": 2.0}))


def test_shards_of_different_tokenizers_are_not_mixed(tmp_path: Path, source: str) -> None:
    train_tokenizer(open_files(Path(source), "text"), 300, tmp_path / "bpe")
    folders = {}
    for name, tokenizer in (("bytes", "byte"), ("bpe_shards", f"hf:{tmp_path / 'bpe'}")):
        config = configure(source, tokenizer=tokenizer)
        prepare(config, tmp_path / name, workers=1, progress=False)
        folders[str(tmp_path / name)] = 1.0
    with pytest.raises(DataError, match=r"bytes.*bpe_shards.*different tokenizers"):
        feed(configure(folders))
    with closing(feed(configure(next(iter(folders))))) as fed:
        assert fed.next_batch().input_ids.shape == (2, 16)


def judged(held_out: ValidationData, ranks: int, micro_batch: int) -> list[tuple[int, ...]]:
    """The samples that count, of all ranks; each rank does the same number of forward passes."""
    found: list[tuple[int, ...]] = []
    of_ranks = [held_out.batches(rank) for rank in range(ranks)]
    assert len({len(batches) for batches in of_ranks}) == 1
    for batch in (batch for batches in of_ranks for batch in batches):
        assert batch.input_ids.numel() == micro_batch * 16
        rows = batch.labels.reshape(micro_batch, 16)
        for inputs, labels in zip(batch.input_ids.reshape(micro_batch, 16), rows, strict=True):
            if (labels != IGNORE_INDEX).any():
                found.append((*inputs.tolist(), *labels.tolist()))
    return found


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("kind", ["synthetic", "stream"])
def test_validation_sees_the_same_samples_however_many_ranks_and_rows(
    source: str, kind: str, packing: str
) -> None:
    name = source if kind == "stream" else "synthetic"
    config = configure(name, packing=packing, synthetic_bytes=20_000)
    expected: list[tuple[int, ...]] = []
    for ranks, micro_batch in ((1, 1), (2, 3), (5, 2)):
        with closing(
            open_validation(config, sequences=13, micro_batch=micro_batch, world_size=ranks)
        ) as held_out:
            found = judged(held_out, ranks, micro_batch)
            assert held_out.note is None
        expected = expected or found
        assert len(set(expected)) == 13
        assert found == expected


def test_validation_has_texts_that_training_never_sees(source: str) -> None:
    _, validation = split(texts(200))
    stream = b"\n".join(validation)
    with closing(
        open_validation(configure(source), sequences=20, micro_batch=1, world_size=1)
    ) as held_out:
        for sample in judged(held_out, 1, 1):
            for text in bytes(min(token, 255) for token in sample[:16]).split(b"\xff"):
                assert text in stream
        assert held_out.bytes_per_token == pytest.approx(0.97, abs=0.02)


@pytest.mark.parametrize("ranks", [1, 4])
def test_validation_says_where_there_are_fewer_samples_than_asked_for(
    tmp_path: Path, ranks: int
) -> None:
    train, validation = split(texts(200))
    source = write_lines(tmp_path / "b.jsonl", train[:20] + validation[:3])
    there = (sum(len(text) + 1 for text in validation[:3]) - 1) // 16
    assert there > 0
    with closing(
        open_validation(configure(source), sequences=50, micro_batch=2, world_size=ranks)
    ) as held_out:
        assert len(judged(held_out, ranks, 2)) == held_out.sequences == there
        assert held_out.note is not None
        assert f"{there} of the 50" in held_out.note


def test_validation_waits_as_long_as_its_source_gives_documents(pipe: tuple[str, Any]) -> None:
    name, writer = pipe
    train, validation = split(texts(200))
    seconds = 3.0

    def write_slowly() -> None:
        for number, text in enumerate([*train[:20], *validation]):
            write(writer, [text])
            time.sleep(seconds / 12 if number < 20 else 0)

    config = configure(name, timeout=seconds)
    slowly = Thread(target=write_slowly, daemon=True)
    slowly.start()
    begun = time.monotonic()
    with closing(open_validation(config, sequences=9, micro_batch=1, world_size=1)) as held_out:
        assert held_out.sequences == 9
    assert time.monotonic() - begun > seconds
    slowly.join()


def test_validation_names_a_source_that_hangs(pipe: tuple[str, Any]) -> None:
    name, writer = pipe
    write(writer, texts(5))
    config = configure(name, timeout=2)
    with (
        closing(open_validation(config, sequences=50, micro_batch=1, world_size=1)) as held_out,
        pytest.raises(DataError, match=r"slow\.jsonl': no document .* 2 sec.*slow\.jsonl:5"),
    ):
        held_out.batches(0)


@pytest.mark.gpu
def test_batches_can_be_pinned() -> None:
    with closing(feed(configure("synthetic", synthetic_bytes=20_000))) as fed:
        assert fed.next_batch().pin_memory().input_ids.is_pinned()
