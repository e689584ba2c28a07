"""Hugging Face datasets: exact parts and cursors, and slow, failing or absent servers."""

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nsa.data.cache import TokenCache
from nsa.data.config import DataConfig
from nsa.data.dataset import DividedSource, open_dataset
from nsa.data.hub import Hub
from nsa.data.source import DataError
from tests.data.hub_server import REPO, serving
from tests.data.texts import configure, write_lines
from tests.ranks import ROOT, free_port, spawn_ranks

FIXES = ("nsa data prepare", "--set data.source=embedded", "HF_HUB_OFFLINE=1")
ENDINGS = {"json": "jsonl", "parquet": "parquet", "large": "parquet"}

JOBS = Path(__file__).with_name("hub_jobs.py")


def results_of(kind: str, home: Path, *jobs: dict[str, Any], **variables: str) -> list[Any]:
    """Do jobs of a kind in a process with an environment of its own; return their results."""
    environment = {"HF_HOME": str(home), **variables}
    ranks = spawn_ranks(JOBS, kind, json.dumps(jobs), ranks=0, environment=environment)
    codes = ranks.codes(300)
    ranks.end()
    assert codes == [0], ranks.text("err")
    return [json.loads(line) for line in ranks.text("out").splitlines()]


def write(folder: Path, kind: str, *sizes: int) -> list[str]:
    """Write files of `sizes` documents each; returns all texts."""
    texts: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        here = [f"document {len(texts) + index} é" for index in range(size)]
        path = folder / f"{number}.{ENDINGS[kind]}"
        if kind == "json":
            path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in here))
        else:
            text = pa.large_string() if kind == "large" else pa.string()
            table = pa.table({"id": range(size), "text": pa.array(here, text)})
            pq.write_table(table, path, row_group_size=20)
        texts += here
    return texts


def test_a_pass_resumes_exactly(tmp_path: Path) -> None:
    """After any document, and far into a file."""
    root = tmp_path / "files"
    written = write(root, "json", 23, 0, 75, 5), write(root, "parquet", 3_000)
    jobs = [
        {"name": f"hf:{REPO}", "pattern": "*.jsonl", "row": None},
        {"name": f"hf:{REPO}", "pattern": "*.parquet", "row": 2_344},
    ]
    with serving(root) as server:
        results = results_of("resume", tmp_path / "home", *jobs, HF_ENDPOINT=server.address)
    assert [result["texts"] for result in results] == [written[0], written[1][2_345:]]


@pytest.mark.parametrize(
    "name", ["hf:json", "hf:parquet", "hf:/data/corpus", "hf:./x", "hf:~/x", "hf:tests/data"]
)
def test_files_by_way_of_datasets_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(DataError, match=r"withdrawn in this version; name the file or folder"):
        open_dataset(DataConfig(source=name))


def test_a_hub_dataset_has_subsets_splits_and_fields(tmp_path: Path) -> None:
    root = tmp_path / "first"
    large, small = write(root / "large", "parquet", 30, 30), write(root / "small", "large", 5)
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/*\n"
        f"  {'default: true' if name == 'large' else ''}\n"
        for name in ("large", "small")
    )
    (root / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    cases: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
        (f"hf:{REPO}", {}, ()),
        (f"hf:{REPO}", {"subset": "small"}, ()),
        (f"hf:{REPO}", {"subset": "tiny"}, ("data.subset = 'tiny'", "'large', 'small'")),
        (f"hf:{REPO}", {"split": "test"}, ("Available splits: ['train']",)),
        (f"hf:{REPO}", {"text_field": "body"}, ("no field 'body', but 'id', 'text'; set data.te",)),
        (f"hf:{REPO}", {"text_field": "id"}, ("the field 'id' holds int, not text; set data.te",)),
        (f"hf:{REPO}", {"pattern": "nowhere/*"}, ("data.pattern = 'nowhere/*'",)),
        ("hf:me/none", {}, ("'me/none' doesn't exist",)),
        ("hf:me/gated", {}, ("'me/gated' is a gated dataset", "hf auth login")),
        ("fineweb_edu", {}, ("data.subset = 'sample-10BT'",)),
        ("fineweb_edu", {"subset": "mine"}, ("data.subset = 'mine'",)),
    ]
    jobs: list[dict[str, Any]] = [{"name": name, "config": config} for name, config, _ in cases]
    with serving(root) as server:
        results = results_of("read", tmp_path / "home", *jobs, HF_ENDPOINT=server.address)
    assert [results[0]["texts"], results[1]["texts"]] == [large, small]
    for (_, _, words), result in zip(cases, results, strict=True):
        assert all(word in result["error"] for word in words), result


def test_broken_and_empty_files_of_a_hub(tmp_path: Path) -> None:
    """A broken record's error names the row before it."""
    root = tmp_path / "root"
    write(root / "bad", "json", 100)
    (root / "bad/1.jsonl").write_text('{"id": 1, "text": "a"}\n{"text": 7\n')
    (root / "empty.jsonl").write_bytes(b"")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("a", "", None, "b"))
    (root / "some.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    patterns = ("some.jsonl.zst", "bad/*", "empty.jsonl")
    jobs = [{"name": f"hf:{REPO}", "config": {"pattern": pattern}} for pattern in patterns]
    with serving(root) as server:
        results = results_of("read", tmp_path / "home", *jobs, HF_ENDPOINT=server.address)
    some, bad, empty = results
    assert some["texts"] == ["a", "b"]
    assert len(bad["texts"]) == 100
    assert "broke off after row 100 " in bad["error"]
    assert "is broken: repair it, or name other files in data.pattern" in bad["error"]
    assert "nothing in its first files" in empty["error"]


def test_a_cache_of_the_hub_keeps_its_revision_and_needs_no_hub_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files on the hub change between the two runs that write it."""
    texts = write(tmp_path / "first", "parquet", *[2_000] * 3)
    write(tmp_path / "second", "parquet", 1)
    job = {"name": f"hf:{REPO}", "folder": str(tmp_path / "parts"), "timeout": 120}

    def samples(source: str, folder: str) -> list[list[int]]:
        with closing(TokenCache(open_dataset(configure(source)), tmp_path / folder)) as cache:
            cache.start({"train": 5_000})
            return cache.open_samples("train", 1).batch(range(5_000)).input_ids.tolist()

    with serving(tmp_path / "first") as server:
        home, hub = tmp_path / "home", {"HF_ENDPOINT": server.address}
        (part,) = results_of("tokenise", home, job | {"samples": 100}, **hub)
        (index,) = (tmp_path / "parts").glob("*/index.json")
        assert not json.loads(index.read_text())["finished"]
        server.versions["c" * 40] = tmp_path / "second"
        (rest,) = results_of("tokenise", home, job | {"samples": 5_000}, **hub)
    assert part["fingerprint"] == rest["fingerprint"]
    monkeypatch.setattr(DividedSource, "is_small", False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    order = samples(write_lines(tmp_path / "a.jsonl", map(str.encode, texts)), "local")
    assert (part["rows"], rest["rows"]) == (order[:100], order)
    assert samples(job["name"], "parts") == order


def test_a_fully_loaded_dataset_is_read_offline_and_another_is_refused(tmp_path: Path) -> None:
    written, home = write(tmp_path / "root", "parquet", 30, 30), tmp_path / "home"
    with serving(tmp_path / "root") as server:
        hub = {"HF_ENDPOINT": server.address}
        assert results_of("load", home, {"name": REPO}, **hub) == [{"rows": 60}]
    jobs = [{"name": f"hf:{name}", "config": {}} for name in (REPO, "someone/else")]
    loaded, other = results_of("read", home, *jobs, **hub, HF_HUB_OFFLINE="1")
    assert loaded["texts"] == written
    for fix in FIXES:
        assert fix in other["error"]


@pytest.mark.parametrize("name", ["hf:someone/corpus", "fineweb_edu"])
def test_a_closed_port_is_reported_at_once_with_fixes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", f"{hub}/")
    with pytest.raises(DataError) as refused:
        Hub(DataConfig(), name)
    assert f"{hub}//" not in str(refused.value)
    for part in (f"{name}: {hub}", "cannot be reached", "Connection refused", *FIXES):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("mode", "complaint"), [("silent", "cannot be reached"), ("unavailable", "HTTP status 503")]
)
def test_an_unresponsive_hub_is_reported_without_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, complaint: str
) -> None:
    with serving(tmp_path, mode) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        if mode == "silent":
            monkeypatch.setattr("nsa.data.hub.PROBE_SECONDS", 2.0)
        with pytest.raises(DataError, match=complaint):
            Hub(DataConfig(), "fineweb_edu")
        assert server.requests == ["HEAD datasets/HuggingFaceFW/fineweb-edu/resolve/main/README.md"]


class BreaksOff:
    """A stream of `datasets` that breaks off after 130 rows."""

    def __init__(self, error: Exception) -> None:
        self.error, self.copied_at = error, list[int]()

    def shard(self, *_: int) -> "BreaksOff":
        return self

    def __iter__(self) -> Iterator[dict[str, str]]:
        for self.row in range(1, 131):
            yield {"text": f"row {self.row}"}
        raise self.error

    def state_dict(self) -> dict[str, int]:
        self.copied_at.append(self.row)
        return {}


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ConnectionError("reset"), r"run the same command again to continue, or run `nsa data"),
        (pa.ArrowInvalid("damaged"), r"the file of this row is broken: repair it"),
    ],
)
def test_a_pass_that_breaks_off_says_at_which_row_and_what_to_do(
    error: Exception, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = BreaksOff(error)
    monkeypatch.setattr(Hub, "_open", lambda *_: (stream, "revision"))
    passed = Hub(DataConfig(), "hf:a/b").read()
    assert sum(1 for _ in islice(passed, 130)) == 130
    name, reason = type(error).__name__, str(error)
    with pytest.raises(DataError, match=rf"hf:a/b: .* after row 130 \({name}: {reason}\); .*{fix}"):
        next(passed)
    assert stream.copied_at == [64, 128], "that takes longer than reading a row"
