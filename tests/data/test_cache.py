"""Token cache: one order however it grew, shared by runs, and continued after kills."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest

from nsa.data import cache as cache_module
from nsa.data.batches import Samples, block_of
from nsa.data.cache import TokenCache
from nsa.data.config import DataConfig
from nsa.data.dataset import DividedSource, open_dataset
from nsa.data.shards import INDEX, Shard, find_index, read_index, verify_shards, write_index
from nsa.data.source import DataError
from nsa.data.writer import (
    FIRST_SHARD,
    LAST_SHARD,
    LOCK,
    TOKEN_SETTINGS,
    Job,
    Writer,
    plan_of,
    prepare,
)
from tests.data.processes import wait_for_end, workers_of
from tests.data.test_prepare import contents
from tests.data.texts import configure, documents_in, split, texts, train_tokenizer, write_lines
from tests.disks import mounted
from tests.ranks import spawn_ranks, wait_for

OpenCache = Callable[..., TokenCache]
RUN = Path(__file__).parent / "caching_run.py"
LARGE = texts(6_000)  # 225 KB: three shards


def test_every_setting_of_data_is_known_to_change_tokens_or_not() -> None:
    """A setting that changes them and is not in TOKEN_SETTINGS would read old tokens."""
    of_the_stamp, of_batches = {"source", "tokenizer"}, {"seq_len", "packing"}
    of_the_run = {"on_error", "timeout", "cache"}
    known = {*TOKEN_SETTINGS, *of_the_stamp, *of_batches, *of_the_run}
    assert {field.name for field in fields(DataConfig)} == known


@pytest.fixture(autouse=True)
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read sources of any size while they grow."""
    monkeypatch.setattr(DividedSource, "is_small", False)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lines(tmp_path_factory.mktemp("text") / "large.jsonl", LARGE)


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[OpenCache]:
    """Open caches in one folder; they are closed at the end."""
    with ExitStack() as stack:

        def opened(config: DataConfig, needs: int = 0) -> TokenCache:
            cache = TokenCache(open_dataset(config), tmp_path / "cache")
            stack.callback(cache.close)
            if needs:
                cache.start({"train": needs})
            return cache

        yield opened


def rows(samples: Samples, count: int, first: int = 0) -> list[list[int]]:
    return samples.batch(range(first, first + count)).input_ids.tolist()


def folder_of(root: Path) -> Path:
    (folder,) = (path for path in (root / "cache").iterdir() if path.is_dir())
    return folder


def complete(config: DataConfig, open_cache: OpenCache) -> Samples:
    """The samples of a cache that is complete."""
    samples: Samples = open_cache(config).open_samples("train", 3)
    samples.stores[0].wait_for(10**9)
    return samples


def test_blocks_grow_from_16_to_512_samples_without_gaps() -> None:
    blocks = list(dict.fromkeys(block_of(index) for index in range(2_048)))
    assert [len(block) for block in blocks] == [16, 16, 32, 64, 128, 256, 512, 512, 512]
    assert [index for block in blocks for index in block] == list(range(2_048))


def test_the_order_is_the_same_while_the_cache_grows_and_when_it_is_complete(
    large: str, open_cache: OpenCache, tmp_path: Path
) -> None:
    samples = open_cache(configure(large)).open_samples("train", 3)
    first = rows(samples, 48)
    assert len(samples.stores[0]) < 2 * FIRST_SHARD
    following = rows(samples, 10_000, 48)
    finished = complete(configure(large), open_cache)
    assert read_index(folder_of(tmp_path)).finished
    assert rows(finished, 10_048) == first + following
    assert samples.fingerprint == finished.fingerprint
    other = open_cache(configure(large)).open_samples("train", 4)
    assert other.fingerprint != samples.fingerprint
    assert rows(other, 48) != first
    index = read_index(folder_of(tmp_path))
    write_index(folder_of(tmp_path), replace(index, cursor={"revision": "b"}))  # as of a hub
    assert complete(configure(large), open_cache).fingerprint != samples.fingerprint


def test_a_writer_stops_once_its_run_has_enough_and_is_followed_if_it_needs_more(
    large: str, open_cache: OpenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Mock(side_effect=Writer.close)
    monkeypatch.setattr(Writer, "close", lambda writer: close(writer))
    first = open_cache(configure(large), needs=100)
    short = rows(first.open_samples("train", 3), 100)
    wait_for(lambda: not workers_of(os.getpid()))
    index = find_index(folder_of(tmp_path))
    assert not index.finished
    kept = contents(folder_of(tmp_path))
    longer = first.open_samples("train", 3)
    longer.stores[0].wait_for(10**9)
    close.assert_called_once()  # before the second writer started
    assert rows(longer, 100) == short
    assert documents_in(longer.stores[0].read(0, len(longer.stores[0]))) == split(LARGE)[0]
    after = contents(folder_of(tmp_path))
    del kept[INDEX]
    assert {name: after[name] for name in kept} == kept
    index = read_index(folder_of(tmp_path))
    verify_shards(folder_of(tmp_path), index)
    sizes = [shard.tokens for shard in index.of("train")]
    assert FIRST_SHARD <= sizes[0] <= sizes[1], "as large as all before it"


def test_two_runs_share_a_cache_and_one_process_writes_it(
    large: str, open_cache: OpenCache, tmp_path: Path
) -> None:
    both = [open_cache(configure(large), needs=10_000) for _ in range(2)]
    assert len(workers_of(os.getpid())) == 1
    samples = [cache.open_samples("train", 3) for cache in reversed(both)]
    assert rows(samples[0], 10_000) == rows(samples[1], 10_000)
    written = contents(folder_of(tmp_path))
    again = open_cache(configure(large, timeout=1), needs=10_000)
    assert not workers_of(os.getpid())
    rows(again.open_samples("train", 3), 10_000)
    assert contents(folder_of(tmp_path)) == written


def test_a_cache_is_shared_by_runs_with_the_same_tokens(tmp_path: Path) -> None:
    lines = "".join('{"text": "some text", "body": "other"}\n' for _ in range(2_000))
    path, other = tmp_path / f"{'a' * 240}.jsonl", tmp_path / "other" / f"{'a' * 240}.jsonl"
    other.parent.mkdir()
    path.write_text(lines)
    other.write_text(lines.replace("some", "more"))  # of the same name and size
    caches, fingerprints = [], []
    shared: list[dict[str, Any]] = [{"seq_len": 32}, {"packing": "documents"}, {"timeout": 9.0}]
    others = [{"held_out": 0.3}, {"text_field": "body"}, {"source": str(other)}]
    for settings in ({}, *shared, *others):
        config = configure(**{"source": str(path)} | settings)
        with closing(TokenCache(open_dataset(config), tmp_path / "cache")) as cache:
            fingerprints.append(cache.stores("train")[0].fingerprint)
        caches.append(len(list((tmp_path / "cache").iterdir())))
    assert caches == [1, 1, 1, 1, 2, 3, 4]
    assert [len({*fingerprints[:count]}) for count in range(1, 8)] == caches


class RecordedJobs:
    """Stands in for the writer: it writes nothing, and records its jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[Job] = []
        self.writers: list[Mock] = []
        monkeypatch.setattr(cache_module, "Writer", self.start)

    def start(self, job: Job, locked: BinaryIO) -> Mock:
        locked.close()
        self.jobs.append(deepcopy(job))
        self.writers.append(Mock(is_running=Mock(return_value=True)))
        return self.writers[-1]


def test_a_writer_gets_the_tokens_that_its_source_needs_in_each_split_and_the_settings(
    open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = RecordedJobs(monkeypatch)
    cache = open_cache(configure({"hf:a/b": 3, "hf:c/d": 1}))
    cache.start({"train": 40, "val": 9})
    blocks = [{"train": 32, "val": 16}, {"train": 16, "val": 16}]  # of 30, 7, 10 and 3 samples
    needs = [{split: 16 * samples + 1 for split, samples in each.items()} for each in blocks]
    assert [job.needs for job in writers.jobs] == needs
    cache.start({"train": 10})  # not less than before
    assert [job.needs for job in writers.jobs[2:]] == needs
    cache.close()
    assert [writer.close.call_count for writer in writers.writers[2:]] == [1, 1]
    for settings in ({"subset": "b"}, {"split": "test"}, {"pattern": "*.c"}):
        open_cache(configure("hf:a/b", **settings), needs=100)
    assert len({job.folder for job in writers.jobs}) == 2 + 3
    job = replace(writers.jobs[0], needs={"train": 10, "val": 5})
    written = [Shard("", split, size, 1, 1, "") for split, size in (("train", 10**9), ("val", 5))]
    assert not job.is_enough(replace(job.plan, shards=written[:1]))
    assert job.is_enough(replace(job.plan, shards=written))
    assert job.shard_tokens(replace(job.plan, shards=written)) == LAST_SHARD
    for size, dtype in ((1 << 16, "uint16"), ((1 << 16) + 1, "uint32")):
        assert plan_of(job.source, Mock(vocab_size=size)).stamp.dtype == dtype


def test_a_run_waits_for_data_timeout_after_each_document(
    open_cache: OpenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordedJobs(monkeypatch)
    cache = open_cache(configure("hf:a/b", timeout=30))
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        if now <= 20 < now + seconds:
            (folder_of(tmp_path) / LOCK).write_text("9 row 1\n of a longer line before")
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(cache_module, "time", clock)
    message = r"no document for 30 seconds \(data\.timeout\); the last one read was row 1\. Raise"
    with pytest.raises(DataError, match=message):
        cache.stores("train")
    assert now == pytest.approx(20 + 30, abs=1)


def test_after_kill_9_the_next_run_continues_without_a_lost_or_repeated_sample(
    large: str, tmp_path: Path
) -> None:
    """The next run may have another number of ranks; this one is rank 0 of two."""
    log, steps = tmp_path / "rows.txt", 1_400
    (run,) = spawn_ranks(RUN, large, str(tmp_path), str(steps), "40", "0", "1", ranks=0).started
    wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") >= 40)
    workers = workers_of(run.pid)
    run.kill()
    run.wait(10)
    wait_for_end(workers)
    finished = spawn_ranks(RUN, large, str(tmp_path), str(steps), "0", "0", "2", ranks=0)
    assert finished.codes(60) == [0], finished.text("err")
    with closing(TokenCache(open_dataset(configure(large)), tmp_path / "other")) as cache:
        order = rows(cache.open_samples("train", 3), steps * 4)
        cache.open_samples("val", 3).stores[0].wait_for(10**9)
    saved = 35  # the last step before 40 that was saved
    expected = [str(order[4 * step : 4 * step + 4]) for step in range(saved)]
    expected += [str(order[4 * step : 4 * step + 2]) for step in range(saved, steps)]
    assert log.read_text().splitlines() == expected
    ours, other = folder_of(tmp_path), next((tmp_path / "other").iterdir())
    mine, theirs = contents(ours), contents(other)
    for name in mine.keys() & theirs.keys() - {INDEX}:
        assert mine[name] == theirs[name], "cut at the same documents"


def test_a_mixture_of_prepared_and_other_sources_has_its_fractions(
    large: str, tmp_path: Path, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(configure("synthetic"), tmp_path / "out")
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {large: 2.0, "~/out": 1.0, "embedded": 1.0}
    samples = open_cache(configure(names), needs=400).open_samples("train", 3)
    located = [samples.locate(position)[0].name for position in range(400)]
    assert [located.count(name) for name in names] == [200, 100, 100]
    resumed = open_cache(configure(names), needs=400).open_samples("train", 3)
    assert rows(resumed, 50, 350) == rows(samples, 400)[350:]
    assert resumed.fingerprint == samples.fingerprint


def test_shards_of_different_tokenizers_are_not_mixed(
    large: str, tmp_path: Path, open_cache: OpenCache
) -> None:
    train_tokenizer(LARGE, 300, tmp_path / "bpe")
    prepare(configure(large), tmp_path / "bytes")
    config = configure({str(tmp_path / "bytes"): 1, large: 1}, tokenizer=f"hf:{tmp_path / 'bpe'}")
    with pytest.raises(DataError, match=r"set data\.tokenizer to a prepared one's") as refused:
        open_cache(config)
    both = rf"{tmp_path}/bytes and {large} have different tokenizers \(byte \w+, hf:{tmp_path}/bpe"
    assert re.search(both, str(refused.value))
    index = read_index(tmp_path / "bytes")
    changed = replace(index, stamp=replace(index.stamp, tokenizer_fingerprint="0" * 64))
    write_index(tmp_path / "bytes", changed)  # by a tokenizer of the same name
    with pytest.raises(DataError, match=r"different tokenizers \(byte 00000000, byte \w+\)"):
        open_cache(configure({str(tmp_path / "bytes"): 1, large: 1}))


def test_a_file_in_place_of_the_cache_is_refused(large: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = TokenCache(open_dataset(configure(large)), tmp_path / "file")
    with pytest.raises(DataError, match=r"jsonl-\w+: cannot be written or locked .*; name another"):
        cache.start({"train": 1})


def test_a_link_in_place_of_a_lock_is_not_followed(
    large: str, tmp_path: Path, open_cache: OpenCache
) -> None:
    complete(configure(large), open_cache)
    folder, precious = folder_of(tmp_path), tmp_path / "precious"
    precious.write_text("mine")
    for name in (INDEX, LOCK):
        (folder / name).unlink(missing_ok=True)
    (folder / LOCK).symlink_to(precious)
    with pytest.raises((DataError, OSError), match="symbolic link"):
        complete(configure(large), open_cache)
    assert precious.read_text() == "mine"


def test_the_error_of_a_broken_document_passes_through_after_those_before_it(
    tmp_path: Path, open_cache: OpenCache
) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, LARGE)
    with path.open("a") as lines:
        lines.write("{broken\n")
    cache = open_cache(configure(str(path)))
    samples = cache.open_samples("train", 3)
    rows(samples, 1_000)
    message = rf"a\.jsonl:{len(LARGE) + 1}: not a line of JSON .*data\.on_error=skip"
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            rows(samples, 12_000)
    skipping = open_cache(configure(str(path), on_error="skip")).open_samples("train", 3)
    assert rows(skipping, 1_000) == rows(samples, 1_000)
    assert skipping.fingerprint == samples.fingerprint, "a stopped run may continue with skip"
    rows(skipping, 12_000)
    with pytest.raises(DataError, match=message):
        complete(configure(str(path)), open_cache)


def test_a_full_disk_names_the_bytes_that_the_run_still_needs(
    large: str, tmp_path: Path, open_cache: OpenCache
) -> None:
    with mounted(tmp_path / "cache", "-t", "tmpfs", "-o", "size=200k", "tmpfs") as disk:
        cache = open_cache(configure(large), needs=8_000)
        with pytest.raises(DataError, match="the disk is full: ") as refused:
            rows(cache.open_samples("train", 3), 8_000)
        index = find_index(folder_of(tmp_path))
        needed = 8_192 * 16 + 1 - index.tokens("train")  # of 8,000 samples, which end in a block
        assert f"full: {2 * needed:,} bytes or more are needed" in str(refused.value)
        assert "are free; free some space and run the same command again" in str(refused.value)
        assert not [path for path in disk.rglob("*") if "bin." in path.name], "no draft is left"


def test_a_process_ends_with_open_caches(large: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from nsa.data.cache import TokenCache\nfrom nsa.data.config import DataConfig\n"
        "from nsa.data.dataset import open_dataset\n"
        "config = DataConfig(source=sys.argv[1], seq_len=16, held_out=0.2)\n"
        "cache = TokenCache(open_dataset(config), Path(sys.argv[2]))\n"
        "cache.start({'train': 10**6})\n"
        "cache.open_samples('train', 1).batch([0])\n"
    )
    run = spawn_ranks(program, large, str(tmp_path / "cache"), ranks=0)
    assert (run.codes(60), run.text("err")) == ([0], "")
