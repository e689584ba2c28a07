"""`data.on_error`: one broken line or file among many stops the run, or is skipped and counted."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa.cli import main
from nsa.data.batches import Samples
from nsa.data.config import DataConfig
from nsa.data.files import BUFFER_BYTES, Files, open_files
from nsa.data.shards import read_index, write_index
from nsa.data.source import DataError, Document
from nsa.data.writer import prepare
from nsa.engine.data import open_data
from nsa.engine.process_group import Ranks
from nsa.engine.run_request import TrainState
from tests.data.test_prepare import contents
from tests.data.texts import configure, open_store
from tests.engine.small import small_request

BROKEN = 6  # lines, rows and files of `folder` that cannot be read


def lines(*texts: str) -> list[str]:
    return [json.dumps({"text": text}) for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight files, of which five have a broken line or a broken end."""
    root = tmp_path_factory.mktemp("text")
    good = lines(*(f"a {number}" for number in range(30)))
    (root / "a.jsonl").write_text("\n".join([*good[:9], "{broken", *good[9:], '{"body": "x"}', ""]))
    archive = gzip.compress("\n".join(lines(*("b" * 99 for _ in range(40_000)))).encode())
    (root / "b.jsonl.gz").write_bytes(archive[: len(archive) // 2])
    (root / "c.parquet").write_bytes(b"PAR1 and no more")
    table = pa.table({"text": [f"d {number:04} {'.' * 50}" for number in range(1_000)]})
    pq.write_table(table, root / "d.parquet", row_group_size=150, compression="none")
    data = bytearray((root / "d.parquet").read_bytes())
    begin = pq.ParquetFile(root / "d.parquet").metadata.row_group(3).column(0).data_page_offset
    data[begin : begin + 40] = b"\xff" * 40  # the fourth group's page header
    (root / "d.parquet").write_bytes(data)
    (root / "e.jsonl").write_text("\n".join(lines("e 1", "e 2")) + "\n[1]\n")
    (root / "f.txt").write_text("f")
    return root


def open_skipping(folder: Path) -> Files:
    return open_files(folder, "text", on_error="skip")


def test_skip_reads_all_else_and_counts_each_broken_piece_once(folder: Path) -> None:
    documents = [document for document, _ in open_skipping(folder).read()]
    texts = [each.text.decode() for each in documents if isinstance(each, Document)]
    errors = [each for each in documents if isinstance(each, DataError)]
    assert sum(text.startswith("a ") for text in texts) == 30
    assert sum(text.startswith("d ") for text in texts) == 450
    assert {"e 1", "e 2", "f"} <= {*texts}
    assert len(errors) == BROKEN
    assert str(errors[0]).startswith(f"{folder}/a.jsonl:10: not a line of JSON")


def test_a_pass_that_resumes_anywhere_skips_the_same(folder: Path) -> None:
    source = open_skipping(folder)
    pairs = list(source.read())
    compressed = [n for n, (each, _) in enumerate(pairs) if getattr(each, "text", b"") == b"b" * 99]
    assert len(compressed) * 110 > BUFFER_BYTES  # the archive breaks after the first buffer
    middle = compressed[:: len(compressed) // 3]
    for at in (0, 8, 9, 10, 29, *middle, *range(len(pairs) - 456, len(pairs), 19)):
        resumed = [str(each) for each, _ in source.read(json.loads(json.dumps(pairs[at][1])))]
        assert resumed == [str(each) for each, _ in pairs[at + 1 :]], at


def test_a_broken_last_file_is_counted_once_by_a_pass_that_resumes_after_it(
    folder: Path, tmp_path: Path
) -> None:
    last = tmp_path / "last"
    last.mkdir()
    (last / "a.txt").write_text("a")
    (last / "b.parquet").write_bytes((folder / "c.parquet").read_bytes())
    (_, _), (error, cursor) = open_skipping(last).read()
    assert isinstance(error, DataError)
    assert list(open_skipping(last).read(cursor)) == []


def test_prepare_counts_in_one_line_what_it_skips(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def prepare(out: str, *flags: str) -> int:
        source = ("--source", str(folder), "--tokenizer", "byte")
        return main(["data", "prepare", *source, "--out", str(tmp_path / out), *flags])

    assert prepare("resumed") == 2
    assert "a.jsonl:10: not a line of JSON" in (error := capfd.readouterr().err)
    assert "or set --on-error=skip" in error
    for out in ("resumed", "at once"):  # what was stopped continues
        assert prepare(out, "--on-error=skip", "--shard-tokens", "100000000") == 0
        output = capfd.readouterr().out
        assert output.count(f"skip left out {BROKEN} lines, rows or files; the first: ") == 1
    index = read_index(tmp_path / "at once")
    write_index(tmp_path / "at once", replace(index, finished=False))  # as if stopped at the end
    assert prepare("at once", "--on-error=skip", "--shard-tokens", "100000000") == 0
    assert f"skip left out {BROKEN} lines" in capfd.readouterr().out
    tokens = [
        {name: data for name, data in contents(tmp_path / out).items() if name.endswith(".bin")}
        for out in ("resumed", "at once")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("few", [False, True])
def test_a_run_that_ends_within_its_first_pass_reports_the_count(
    few: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With many documents, and with few."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["{broken", "[1]", *lines(*map(str, range(20 if few else 500)))]))
    config = small_request("--set=data.on_error=skip", "--set=data.seq_len=8").config
    config.data.source, config.train.eval_samples = str(path), 1
    data = open_data(config, Ranks(0, 0, 1), TrainState(), tmp_path / "run")
    data.step_batches(0)
    replace(data, rank=1).close()
    assert "left out" not in capsys.readouterr().err, "rank 0 says so, once"
    data.close()
    assert capsys.readouterr().err == (
        f"nsa: {path}: data.on_error = skip left out 2 lines, rows or files; the first: "
        f"{path}:1: not a line of JSON (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)); fix or remove it\n"
    )


def test_memory_reports_the_count_in_the_first_lines(folder: Path) -> None:
    config = DataConfig(source=str(folder / "a.jsonl"), on_error="skip")
    store = open_store(config, "train")
    assert "left out 2 lines, rows or files" in Samples([store], seq_len=16, seed=0).describe(1)[0]


def test_nothing_but_broken_files_is_no_dataset(folder: Path, tmp_path: Path) -> None:
    """The error says why: that of a run, and of `nsa data prepare`."""
    config = configure(str(folder / "c.parquet"), on_error="skip")
    reason = r".* left out 1 lines, rows or files; the first: .*c\.parquet: cannot be read"
    with pytest.raises(DataError, match="holds no documents" + reason):
        open_store(config, "train")
    with pytest.raises(DataError, match="holds no documents" + reason):
        prepare(config, tmp_path / "out")
