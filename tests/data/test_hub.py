"""Streams of `datasets`: exact shares, exact places, and servers that are slow, ill or gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nsa.data.config import DataConfig
from nsa.data.hub import open_hub
from nsa.data.source import DataError, Source
from tests.data.hub_server import REPO, serving
from tests.ranks import ROOT, free_port

LIMIT = 30.0  # seconds in which a user knows that the hub is not there
MENDS = ("nsa data prepare", "--set data.source=embedded", "HF_HUB_OFFLINE=1")
ENDINGS = {"json": "jsonl", "parquet": "parquet"}

# Reads the sources that it is told, and says what came of each; `datasets` looks at the
# environment when it is imported, so each environment has a process of its own.
READ = """
import datasets, json, sys, time
from nsa.data.config import DataConfig
from nsa.data.hub import open_hub, reach_hub
for job in json.loads(sys.argv[1]):
    began, texts, state = time.monotonic(), [], None
    try:
        if "what" in job:
            reach_hub(job["what"])
        else:
            reader = open_hub(DataConfig(**job["config"]), job["name"]).read(job.get("state"))
            while len(texts) < job.get("take", 1e9) and (found := next(reader, None)):
                texts.append(found.text.decode())
            state = reader.state()
        error = None
    except ValueError as refused:
        error = str(refused)
    seconds = time.monotonic() - began
    print(json.dumps({"texts": texts, "state": state, "error": error, "seconds": seconds}))
"""


class Child:
    """A fresh process that reads what it is told, in an environment of its own."""

    def __init__(
        self, home: Path, *jobs: dict[str, Any], code: str = READ, **variables: str
    ) -> None:
        environment = {**os.environ, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(jobs)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def results(self) -> list[dict[str, Any]]:
        """What came of each job."""
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]


def write(folder: Path, kind: str, *sizes: int) -> list[str]:
    """Files of so many documents each; all of their texts."""
    texts: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        here = [f"document {len(texts) + index} é" for index in range(size)]
        path = folder / f"{number}.{ENDINGS[kind]}"
        if kind == "json":
            path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in here))
        else:
            table = pa.table({"id": range(size), "text": pa.array(here, pa.string())})
            pq.write_table(table, path, row_group_size=20)
        texts += here
    return texts


def opened(kind: str, files: Path | str, **settings: Any) -> Source:
    return open_hub(DataConfig(files=str(files), **settings), f"hf:{kind}")


def texts(source: Source, state: dict[str, Any] | None = None) -> list[str]:
    return [document.text.decode() for document in source.read(state)]


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_parts_hold_each_document_once_however_many_there_are(
    tmp_path: Path, kind: str, count: int
) -> None:
    written = write(tmp_path, kind, 23, 0, 70, 5, 1)
    source = opened(kind, tmp_path / "*")
    assert texts(source) == written
    parts = [texts(source.part(index, count)) for index in range(count)]
    assert sorted(text for part in parts for text in part) == sorted(written)


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize("sizes", [(70,), (23, 0, 75, 5)], ids=["one file", "some files"])
@pytest.mark.parametrize(("index", "count"), [(0, 1), (1, 2), (4, 7)])
def test_a_pass_goes_on_from_any_document_and_the_next_one_is_whole(
    tmp_path: Path, kind: str, sizes: tuple[int, ...], index: int, count: int
) -> None:
    write(tmp_path, kind, *sizes)
    whole = list(opened(kind, tmp_path / "*").part(index, count).read())
    for given in sorted(
        {*range(0, len(whole), 9), *range(62, 68), len(whole)} & {*range(len(whole) + 1)}
    ):
        source = opened(kind, tmp_path / "*").part(index, count)
        reader = source.read()
        assert [next(reader) for _ in range(given)] == whole[:given]
        rest = source.read(json.loads(json.dumps(reader.state())))
        again = source.read(json.loads(json.dumps(rest.state())))  # nothing was taken from it
        taken = [next(again) for _ in range(min(2, len(whole) - given))]
        third = source.read(json.loads(json.dumps(again.state())))
        assert taken + list(third) == list(rest) == list(reader) == whole[given:]
        assert list(source.read(json.loads(json.dumps(third.state())))) == []
        assert list(source.read()) == whole


def test_a_place_in_a_long_file_is_exact_far_from_its_start(tmp_path: Path) -> None:
    written = write(tmp_path, "parquet", 3_000)
    source = opened("parquet", tmp_path / "*")
    reader = source.read()
    for _ in range(2_345):
        next(reader)
    rest = list(source.read(reader.state()))
    assert [document.text.decode() for document in rest] == written[2_345:]
    assert rest[0].place == "hf:parquet, part 1 of 1: row 2346"


def test_records_without_text_are_left_out_and_compressed_files_are_read(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("a", "", None, "b"))
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    source = opened("json", tmp_path / "*")
    assert texts(source) == ["a", "b"]
    assert [document.place[-1] for document in source.read()] == ["1", "4"]


def test_a_local_folder_is_a_dataset_and_needs_no_hub(tmp_path: Path) -> None:
    written = write(tmp_path, "parquet", 3, 4)
    assert texts(open_hub(DataConfig(), f"hf:{tmp_path}")) == written


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"text_field": "body"}, r"no field 'body', but 'id', 'text'; set data\.text_field"),
        ({"text_field": "id"}, r"the field 'id' holds int64, not text; set data\.text_field"),
        ({"split": "test"}, r"data\.split = 'test'.*Available splits: \['train'\]"),
        ({"files": None}, r"set data\.files to a path, a pattern or an address"),
        ({"files": "/nowhere/x.jsonl"}, r"data\.files = '/nowhere/x\.jsonl'.*Unable to find"),
        ({"files": "empty.jsonl"}, r"data\.files = .*empty\.jsonl.* nothing in its first files"),
    ],
)
def test_what_is_not_in_a_dataset_is_refused_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], complaint: str
) -> None:
    write(tmp_path, "json", 3)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=complaint):
        open_hub(DataConfig(**{"files": "0.jsonl", **settings}), "hf:json")


def test_a_broken_record_is_named_by_the_row_in_front_of_it(tmp_path: Path) -> None:
    write(tmp_path, "json", 100)
    (tmp_path / "1.jsonl").write_text('{"id": 1, "text": "a"}\n{"text": 7\n')
    reader = opened("json", tmp_path / "*").read()
    for _ in range(100):
        next(reader)
    with pytest.raises(DataError, match=r"broke off after row 100 .*is broken: fix it, or name"):
        next(reader)


def test_another_set_of_files_is_not_read_on_from_an_old_place(tmp_path: Path) -> None:
    write(tmp_path, "json", 3, 3)
    reader = opened("json", tmp_path / "*").read()
    next(reader)
    (tmp_path / "0.jsonl").unlink()
    with pytest.raises(DataError, match=r"no longer those that this run was reading"):
        opened("json", tmp_path / "*").read(reader.state())


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize("mood", ["well", "slow"])
def test_a_mirror_is_read_to_the_end_however_slow_it_is(
    tmp_path: Path, kind: str, mood: str
) -> None:
    written = write(tmp_path, kind, 500)
    with serving(tmp_path, mood) as server:
        source = opened(kind, f"{server.address}/0.{ENDINGS[kind]}")
        reader = source.read()
        for _ in range(100):
            next(reader)
        assert texts(source, reader.state()) == written[100:]


def test_a_mirror_that_breaks_off_for_a_moment_costs_no_document(tmp_path: Path) -> None:
    written = write(tmp_path, "json", 2_000)
    with serving(tmp_path, "breaking off") as server:
        server.bad_answers = 4  # beyond those to questions about the file: within its content
        assert texts(opened("json", f"{server.address}/0.jsonl")) == written
        assert server.bad_answers == 0


# How they fail, and behind how many good answers. What is waited for are the limits of patience:
# all of them wait side by side, and with the tests in between.
HUBS = {
    "a hub that is silent once it has answered": ("silent", 3),
    "a hub that is silent once it is read": ("silent", 7),
    "a hub in trouble once it is read": ("in trouble", 7),
}
MIRRORS = {
    "a mirror that is silent": ("json", "silent", 0),
    "a mirror that is silent once it has answered": ("json", "silent", 1),
    "a mirror that is silent once it is read": ("parquet", "silent", 4),
    "a mirror that always breaks off": ("json", "breaking off", 0),
    "a mirror that hangs up once it has answered": ("json", "hanging up", 1),
    "a mirror in trouble once it is read": ("parquet", "in trouble", 4),
}


def refusal(kind: str, address: str) -> dict[str, Any]:
    """What reading from a mirror ends with, and when."""
    began = time.monotonic()
    with pytest.raises(DataError) as refused:
        texts(opened(kind, address))
    return {"error": str(refused.value), "seconds": time.monotonic() - began}


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Callable[[], Any]]]:
    root = tmp_path_factory.mktemp("served")
    noise = [os.urandom(1_500).hex() for _ in range(3_000)]
    (root / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in noise))
    pq.write_table(pa.table({"text": noise}), root / "x.parquet", row_group_size=100)
    found: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(len(MIRRORS)))
        for name, (mood, good_answers) in HUBS.items():
            server = stack.enter_context(serving(root, mood))
            server.good_answers = good_answers
            job = {"name": f"hf:{REPO}", "config": {"files": "x.parquet"}}
            child = Child(tmp_path_factory.mktemp("home"), job, HF_ENDPOINT=server.address)
            stack.callback(child.process.kill)
            found[name] = lambda child=child: child.results()[0]
        for name, (kind, mood, good_answers) in MIRRORS.items():
            server = stack.enter_context(serving(root, mood))
            server.good_answers = good_answers
            address = f"{server.address}/x.{ENDINGS[kind]}"
            found[name] = threads.submit(refusal, kind, address).result
        yield found


def test_a_hub_serves_its_subsets_and_refuses_what_it_lacks_by_name(
    tmp_path: Path, waiting: dict[str, Callable[[], Any]]
) -> None:
    root = tmp_path / "first"
    large, small = write(root / "large", "parquet", 30, 30), write(root / "small", "parquet", 5)
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/*\n"
        f"  {'default: true' if name == 'large' else ''}\n"
        for name in ("large", "small")
    )
    (root / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    name = f"hf:{REPO}"
    jobs: list[dict[str, Any]] = [
        {"name": name, "config": config}
        for config in (
            {},
            {"subset": "small"},
            {"subset": "tiny"},
            {"split": "test"},
            {"text_field": "body"},
        )
    ]
    jobs += [{"name": "hf:me/none", "config": {}}, {"name": "hf:me/gated", "config": {}}]
    jobs.append({"name": name, "config": {}, "take": 40})
    with serving(root) as server:
        found = Child(tmp_path / "home", *jobs, HF_ENDPOINT=server.address).results()
        assert found[0]["texts"] == large
        assert found[1]["texts"] == small
        errors = [result["error"] or "" for result in found]
        assert "data.subset = 'tiny'" in errors[2]
        assert "'large', 'small'" in errors[2]
        assert "Available splits: ['train']" in errors[3]
        assert "no field 'body', but 'id', 'text'; set data.text_field" in errors[4]
        assert "'me/none' doesn't exist" in errors[5]
        assert "'me/gated' is a gated dataset" in errors[6]
        assert "hf auth login" in errors[6]

        # The hub's files change while the run rests: it goes on with those that it began with.
        write(tmp_path / "second/large", "parquet", 1)
        (tmp_path / "second/README.md").write_text((root / "README.md").read_text())
        server.versions["c" * 40] = tmp_path / "second"
        jobs = [{"name": name, "config": {}, "state": found[7]["state"]}, jobs[0]]
        later = Child(tmp_path / "later", *jobs, HF_ENDPOINT=server.address).results()
    assert later[0]["texts"] == large[40:]
    assert later[1]["texts"] == ["document 0 é"]


LOAD_WHOLE = f"import datasets; datasets.load_dataset({REPO!r})"


def test_a_home_that_a_dataset_was_loaded_into_whole_serves_it_without_a_hub(
    tmp_path: Path, waiting: dict[str, Callable[[], Any]]
) -> None:
    written = write(tmp_path / "root", "parquet", 30, 30)
    streamed, whole = tmp_path / "streamed", tmp_path / "whole"
    job = {"name": f"hf:{REPO}", "config": {}}
    with serving(tmp_path / "root") as server:
        children = [
            Child(streamed, job, HF_ENDPOINT=server.address),
            Child(whole, code=LOAD_WHOLE, HF_ENDPOINT=server.address),
        ]
        for child in children:
            child.process.communicate(timeout=120)
            assert child.process.returncode == 0
        hub = {"HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "1"}
    children = [Child(whole, job, **hub), Child(streamed, job, **hub)]
    (from_whole,), (from_streamed,) = (child.results() for child in children)
    assert from_whole["texts"] == written
    assert from_streamed["texts"] == []
    for fix in MENDS:
        assert fix in from_streamed["error"]


@pytest.mark.parametrize("name", ["hf:someone/corpus", "fineweb_edu", "tokenizer"])
def test_a_hub_whose_port_is_closed_is_reported_at_once_with_the_mends(
    tmp_path: Path, waiting: dict[str, Callable[[], Any]], name: str
) -> None:
    job = {"what": name} if name == "tokenizer" else {"name": name, "config": {}}
    hub = f"http://127.0.0.1:{free_port()}"
    (found,) = Child(tmp_path, job, HF_ENDPOINT=hub).results()
    assert found["seconds"] < LIMIT
    assert f"{name}: {hub}" in found["error"]
    for fix in ("cannot be reached", "Connection refused", *MENDS):
        assert fix in found["error"]


@pytest.mark.parametrize(
    ("mood", "complaint"), [("silent", "cannot be reached"), ("in trouble", "HTTP status 503")]
)
def test_a_hub_that_does_not_answer_is_not_left_to_the_patience_of_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mood: str, complaint: str
) -> None:
    with serving(tmp_path, mood) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        if mood == "silent":
            monkeypatch.setattr("nsa.data.hub.PATIENCE", 0.5)
        began = time.monotonic()
        with pytest.raises(DataError, match=complaint):
            open_hub(DataConfig(), "fineweb_edu")
        assert time.monotonic() - began < LIMIT
        assert server.asked == ["HEAD datasets/HuggingFaceFW/fineweb-edu/resolve/main/README.md"]


@pytest.mark.parametrize("name", [*HUBS, *MIRRORS])
def test_a_server_that_fails_is_reported_within_half_a_minute(
    waiting: dict[str, Callable[[], Any]], name: str
) -> None:
    found = waiting[name]()
    assert found["error"] is not None, found["texts"][-1:]
    assert found["seconds"] < LIMIT
    assert (f"hf:{REPO}" if name in HUBS else f"hf:{MIRRORS[name][0]}") in found["error"]
    for fix in MENDS:
        assert fix in found["error"]
