"""Sources: every document once, from any cursor; errors name the file, and stop or are skipped."""

import csv
import gzip
import hashlib
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nsa.cli import main
from nsa.data.batches import Samples
from nsa.data.builtin import embedded, python_files, synthetic
from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.files import BUFFER_BYTES, HEAD_BYTES, LARGEST_TEXT, Files, open_files
from nsa.data.shards import read_index, write_index
from nsa.data.source import DataError, Document, Source
from nsa.data.writer import prepare
from nsa.engine.config import RunConfig, resolve_config
from nsa.engine.data import open_data
from nsa.engine.process_group import Ranks
from nsa.engine.run_request import TrainState
from tests.data.test_prepare import contents
from tests.data.texts import check_resumption, configure, contents_of, open_store
from tests.engine.small import small_request
from tests.fuzz.hostile import time_limit
from tests.ranks import ROOT

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def lines(*texts: object, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def numbered(count: int, name: str = "document") -> list[str]:
    return [f"{name} {number} " + "é" * number for number in range(count)]


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_parquet(folder: Path, name: str, texts: list[str | None], group: int = 5) -> Path:
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})
    pq.write_table(table, folder / name, row_group_size=group)
    return folder / name


def texts(source: Source) -> list[str]:
    return [document.text.decode() for document in source.read_all()]


def mixed_folder(folder: Path) -> Path:
    """A folder with each kind of file, and empty lines, rows and files."""
    write(folder, "a.txt", b"one file\n\nis one document")
    write(folder, "b/empty.txt", b"")
    write(folder, "b/lines.jsonl", lines(*numbered(7)) + b"\n  \r\n" + lines("", None, "last"))
    write(folder, "b/lines.ndjson.gz", gzip.compress(lines(*numbered(5, "packed"))))
    write(folder, "c/empty.jsonl", b"")
    write(folder, "c/empty.jsonl.gz", gzip.compress(b""))
    write(folder, "c/empty.txt.zst", b"")  # not even an archive
    write(folder, "c/lines.jsonl.zst", COMPRESS[".zst"](lines(*numbered(9, "squeezed"))))
    write_parquet(folder, "d.parquet", ["", None, *numbered(13, "row")])
    write_parquet(folder, "e.parquet", [])
    return folder


@pytest.mark.parametrize("compression", COMPRESS)
def test_lines_and_plain_text_read_the_same_with_any_compression(
    tmp_path: Path, compression: str
) -> None:
    pack = COMPRESS[compression]
    path = write(
        tmp_path, f"l.jsonl{compression}", pack(lines(*numbered(4)).replace(b"\n", b"\r\n"))
    )
    assert texts(open_files(path, "text")) == numbered(4)
    assert [document.location for document in open_files(path, "text").read_all()][
        3
    ] == f"{path.name}:4"
    shouted = path.rename(tmp_path / f"l.JSONL{compression.upper()}")
    assert texts(open_files(shouted, "text")) == numbered(4)
    plain = write(tmp_path, f"t.txt{compression}", pack(b"as it is:\r\n \xff\xfe\n"))
    assert list(open_files(plain, "text").read_all()) == [
        Document(b"as it is:\r\n \xff\xfe\n", plain.name)
    ]


def test_concatenated_archives_are_read_to_the_end(tmp_path: Path) -> None:
    for compression in (".gz", ".zst"):
        pack = COMPRESS[compression]
        halves = pack(lines(*numbered(3))) + pack(lines(*numbered(2)))
        path = write(tmp_path, f"two.jsonl{compression}", halves)
        assert texts(open_files(path, "text")) == numbered(3) + numbered(2)


def test_a_folder_is_read_by_path_without_hidden_and_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed_folder(tmp_path)
    for hidden in (".cache/x.txt", ".hidden.txt", "b/.x.jsonl", "README.md", "b/notes.json"):
        write(tmp_path, hidden, b"not read")
    locations = [document.location for document in open_files(tmp_path, "text").read_all()]
    assert list(dict.fromkeys(location.split(":")[0] for location in locations)) == [
        "a.txt",
        "b/lines.jsonl",
        "b/lines.ndjson.gz",
        "c/lines.jsonl.zst",
        "d.parquet",
    ]
    assert {"b/lines.jsonl:7", "b/lines.jsonl:12", "d.parquet:3", "d.parquet:15"} <= set(locations)
    assert len(locations) == len(set(locations)) == 1 + 8 + 5 + 9 + 13
    monkeypatch.setenv("HOME", str(tmp_path))  # no shell expands a ~ inside of a mixture
    (source,) = open_dataset(DataConfig(source="~/a.txt")).sources
    assert texts(source.documents) == texts(open_files(tmp_path / "a.txt", ""))


def test_a_pass_resumes_after_any_document(tmp_path: Path) -> None:
    assert len(check_resumption(open_files(mixed_folder(tmp_path), "text"))) == 36


def test_resuming_does_not_parse_earlier_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "l.jsonl", lines("first", "second"))
    _, cursor = next(open_files(path, "text").read())
    path.write_bytes(b"#" * (len(lines("first")) - 1) + b"\n" + lines("second"))
    assert contents_of(open_files(path, "text"), cursor) == [b"second"]
    table = write_parquet(tmp_path, "t.parquet", numbered(10))  # two groups of rows
    *_, (_, cursor) = islice(open_files(table, "text").read(), 6)
    content = bytearray(table.read_bytes())
    group = pq.read_metadata(table).row_group(0).column(1)
    start = group.dictionary_page_offset or group.data_page_offset
    content[start : start + group.total_compressed_size] = bytes(group.total_compressed_size)
    table.write_bytes(content)
    rest = [text.encode() for text in numbered(10)[6:]]
    assert contents_of(open_files(table, "text"), cursor) == rest


def test_a_group_of_rows_is_read_in_parts(tmp_path: Path) -> None:
    rows = [f"{number} " + "x" * 10_000 for number in range(1_000)]
    path = write_parquet(tmp_path, "t.parquet", rows, group=1_000)
    tracemalloc.start()
    assert sum(1 for _ in open_files(path, "text").read_all()) == len(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < sum(map(len, rows)) / 2


def test_a_giant_document_is_read_in_full(tmp_path: Path) -> None:
    giant = "0123456789abcde\n" * (12_000_000 // 16)  # more than LARGEST_TEXT
    write(tmp_path, "g.jsonl", lines("before", giant, "behind"))
    write_parquet(tmp_path, "g.parquet", [giant])
    write(tmp_path, "g.txt.zst", COMPRESS[".zst"](giant.encode()))
    contents = [document.text for document in open_files(tmp_path, "text").read_all()]
    assert [len(text) for text in contents] == [6, len(giant), 6, len(giant), len(giant)]
    assert contents[1] == contents[3] == contents[4] == giant.encode()


def test_invalid_utf8_is_kept_in_plain_text_and_replaced_in_json_lines(tmp_path: Path) -> None:
    bad = b'{"text": "a\xff\xfeb"}\n{"text": "\\ud800 alone"}\n'
    assert texts(open_files(write(tmp_path, "l.jsonl", bad), "text")) == [
        "a\ufffd\ufffdb",
        "\ufffd\ufffd\ufffd alone",
    ]
    assert texts(open_files(write(tmp_path, "t.csv", b"text\na\xff\n"), "text")) == ["a\ufffd"]
    marked = write(tmp_path, "bom.jsonl", b"\xef\xbb\xbf" + lines("after a byte order mark"))
    assert texts(open_files(marked, "text")) == ["after a byte order mark"]
    raw = pa.array([b"a\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), tmp_path / "r.parquet")
    with pytest.raises(DataError, match=r"r\.parquet: cannot be read \('utf-8' codec"):
        next(open_files(tmp_path / "r.parquet", "text").read_all())


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=["large", "dictionary"]
)
def test_other_text_columns_of_arrow_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"body": pa.array(["one", "two", "one"]).cast(kind)})
    pq.write_table(table, tmp_path / "t.parquet")
    assert texts(open_files(tmp_path / "t.parquet", "body")) == ["one", "two", "one"]


def test_sizes_are_known_without_compression(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", b"x" * 1_000)
    assert open_files(tmp_path, "text").size() == 1_000
    rows = [f"{number:1000}" for number in range(200)]
    table = pa.table({"title": rows, "text": rows})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=200)
    total = open_files(tmp_path, "text").size()
    assert total == pytest.approx(201_000, rel=0.05)
    write(tmp_path, "c.jsonl", b"y" * 50)
    assert open_files(tmp_path, "text").size() == total + 50
    for name in ("c.txt.gz", "d.TXT.GZ"):
        packed = write(tmp_path, name, gzip.compress(b"x"))
        assert open_files(tmp_path, "text").size() is open_files(packed, "text").size() is None


def test_a_missing_path_is_refused_with_a_similar_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'embeded': no such file.*did you mean 'embedded'\?"):
        open_files(Path("embeded"), "text")
    with pytest.raises(DataError, match=r"no such file or folder; choose embedded, synthetic, "):
        open_files(tmp_path / "nowhere", "text")


def test_unsupported_files_are_refused_with_the_supported_formats(tmp_path: Path) -> None:
    picture = write(tmp_path, "picture.png", b"\x89PNG\r\n\0\0")
    for path in (picture, write(tmp_path, "x.parquet.gz", b"")):
        with pytest.raises(DataError, match=rf"{path.name}'.*\{path.suffix}.*\.jsonl, \.ndjson"):
            open_files(path, "text")
    message = r"no text in this folder, which holds picture\.png.*\.jsonl"
    with pytest.raises(DataError, match=message):
        open_files(tmp_path, "text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"which holds no files"):
        open_files(tmp_path / "empty", "text")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{text: 1}", r"not a line of JSON"),
        (b"[" * 100_000, r"not a line of JSON"),
        (b"\0\0\0", r"not a line of JSON"),
        (b'["text"]', r"a list, not an object with the field 'text' \(data\.text_field\)"),
        (b'{"id": 1, "body": "x"}', r"no field 'text', but 'id', 'body'; set data\.text_field"),
        (b"{}", r"no field 'text', but none at all"),
        (b'{"text": {"en": "x"}}', r"the field 'text' holds dict, not text; set data\.text_field"),
    ],
)
def test_the_error_of_a_bad_line_names_its_number(
    tmp_path: Path, line: bytes, complaint: str
) -> None:
    path = write(tmp_path, "l.jsonl", lines("good") + b"\n" + line + b"\n")
    reader = open_files(path, "text").read_all()
    assert next(reader).text == b"good"
    with pytest.raises(DataError, match=rf"l\.jsonl:3: {complaint}.*, or set data\.on_error=skip$"):
        next(reader)


def test_a_parquet_file_without_a_text_column_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, "t.parquet", numbered(3))
    with pytest.raises(DataError, match=r"t\.parquet: no field 'body', but 'id', 'text'; set data"):
        next(open_files(path, "body").read_all())
    with pytest.raises(DataError, match=r"t\.parquet: the field 'id' holds int, not text; set"):
        next(open_files(path, "id").read_all())


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_truncated_archive_is_an_error_not_an_early_end(
    tmp_path: Path, compression: str, kind: str
) -> None:
    packed = COMPRESS[compression](lines(*(os.urandom(500).hex() for _ in range(100))))
    for cut in (1, 9, len(packed) // 2):
        path = write(tmp_path, f"cut.{kind}{compression}", packed[:-cut])
        with pytest.raises(DataError, match=rf"cut\.{kind}{compression}: cannot be read"):
            list(open_files(path, "text").read_all())


def test_a_truncated_or_damaged_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, "t.parquet", numbered(500), group=100)
    intact = path.read_bytes()
    damaged = bytearray(intact)
    damaged[len(intact) // 3 : len(intact) // 3 + 200] = bytes(200)
    for broken in (intact[:-30], bytes(damaged)):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"t\.parquet: cannot be read .*data\.on_error=skip$"):
            list(open_files(path, "text").read_all())


@pytest.mark.parametrize("name", ["b.jsonl", "b.txt", "b.jsonl.gz", "b.parquet"])
def test_a_file_that_shrank_or_was_removed_since_it_was_opened_is_refused(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path, "a.txt", b"first")
    if name == "b.parquet":
        path = write_parquet(tmp_path, name, numbered(8))
    else:
        path = write(
            tmp_path, name, COMPRESS[".gz" if name[-1] == "z" else ""](lines(*numbered(8)))
        )
    source = open_files(tmp_path, "text")
    reader = source.read_all()
    next(reader)
    path.write_bytes(path.read_bytes()[:-4])
    shrunk = open_files(tmp_path, "text")
    path.rename(other := path.with_name(f"a{name}"))
    contents = {files.content for files in (source, shrunk, open_files(tmp_path, "text"))}
    assert len(contents) == 3, "of names and sizes"
    other.rename(path)
    with pytest.raises(DataError, match=rf"{name}: changed from \d+ to \d+ bytes while"):
        list(reader)
    reader = open_files(tmp_path, "text").read_all()
    next(reader)
    path.unlink()
    with pytest.raises(DataError, match=rf"{name}: cannot be read .*No such file"):
        list(reader)


def test_a_file_replaced_during_reading_is_read_to_its_old_end(tmp_path: Path) -> None:
    path = write(tmp_path, "l.jsonl", lines(*numbered(2_000)))
    reader = open_files(path, "text").read_all()
    first = next(reader)
    write(tmp_path, "new", lines("other text")).replace(path)
    assert [x.text.decode() for x in (first, *reader)] == numbered(2_000)


def test_every_text_of_a_folder_of_code_and_notes_is_a_document(tmp_path: Path) -> None:
    kept = {
        "README.md": f"#{'é' * HEAD_BYTES}".encode(),  # what is looked at ends inside of an é
        "a/main.py": b"print(1)\n",
        "a/page.html": b"<p>hi</p>",
        "b/Makefile": b"all:\n",
        "b/options.json": b'{"text": 1}',
        "b/other.csv": b"id,value\n1,2\n",
        "c.rst": b"\xef\xbb\xbfTitle",
        "c.txt": b"plain \xff",  # named .txt: kept byte for byte
    }
    for name, text in kept.items():
        write(tmp_path, name, text)
    skipped = {
        "empty.py": b"",
        "photo.jpg": b"\xff\xd8\xff\xe0",
        "program": b"\x7fELF\0\0",
        "bundle.js": b"x" * (LARGEST_TEXT + 1),
    }
    for name, text in skipped.items():
        write(tmp_path, name, text)
    write(tmp_path, ".git/config", b"[core]")
    source = open_files(tmp_path, "text")
    found = {document.location: document.text for document in source.read_all()}
    assert found == kept
    assert source.left_out == len(skipped)
    mixture = {"hf:a/b": 1.0, str(tmp_path): 1.0, "synthetic": 1.0}
    assert open_dataset(DataConfig(source=mixture)).notes == [
        f"{tmp_path}: 8 files are read; 4 that are empty, binary or huge are not",
        f"{tmp_path}: is small, so the last 12% of each document is held out for validation, "
        "instead of data.held_out = 0.05",
    ]
    larger = open_dataset(DataConfig(source=str(tmp_path), held_out=0.5))
    assert (larger.notes[1:], larger.sources[0].division.fraction) == ([], 0.5)
    names = [file.name for file in open_files(tmp_path, "text", "*.py").files]
    assert names == ["a/main.py"]
    assert [file.name for file in open_files(tmp_path, "text", "b/*").files] == sorted(
        name for name in kept if name.startswith("b/")
    )
    with pytest.raises(DataError, match=r"no files \(data\.pattern = '\*\.rs'\)"):
        open_files(tmp_path, "text", "*.rs")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", b'id,text\n1,"two\nlines, one ""field"""\n2,\n3,caf\xc3\xa9\n'),
        (  # with a byte order mark, as Excel writes it
            "t.tsv",
            b'\xef\xbb\xbftext\tid\r\n"two\nlines, one ""field"""\t1\r\n\t2\r\ncaf\xc3\xa9\t3\r\n',
        ),
        (
            "t.json",
            b' [{"id": 1, "text": "two\\nlines, one \\"field\\""}, {"text": null},'
            b' {"text": "caf\\u00e9"}]',
        ),
    ],
)
@pytest.mark.parametrize("compression", COMPRESS)
def test_tables_and_json_arrays_are_read_by_field(
    name: str, content: bytes, compression: str, tmp_path: Path
) -> None:
    path = write(tmp_path, name + compression, COMPRESS[compression](content))
    expected = ['two\nlines, one "field"', "café"]
    for source in (open_files(path, "text"), open_files(tmp_path, "text")):
        assert texts(source) == expected
        check_resumption(source)
    write(tmp_path, "about.md", b"notes")
    assert texts(open_files(tmp_path, "text", "t.*")) == expected
    whole = [] if compression else [content.decode()]
    assert texts(open_files(tmp_path, "text")) == ["notes", *whole]  # of a folder of other texts
    with pytest.raises(DataError, match=r"t\.[\w.]+:1: no field 'body', but .*data\.text_field"):
        texts(open_files(path, "body"))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.json", b'[{"text": "x"}, ', r"a\.json: cannot be read \(Expecting value"),
        ("b.json", b'[1, "text"]', r"b\.json:1: a int, not an object with the field 'text'"),
        ("c.csv.gz", b"text, but no archive", r"c\.csv\.gz: cannot be read"),
        ("d.json", b'{"text": "x"}\n', r"d\.json: .*not an array.*an object per line.*\.jsonl"),
        ("e.json", json.dumps([{"text": "x" * 300}]).encode(), "not an array of at most 99 "),
        ("f.csv", b"text\n" + b"x" * 100, r"field larger than field limit \(99\)"),
    ],
)
def test_a_broken_table_or_one_that_would_fill_the_memory_is_refused_by_name(
    name: str, content: bytes, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.data.files.MAX_LINE_BYTES", 99)
    limit = csv.field_size_limit()  # of the whole process
    try:
        with pytest.raises(DataError, match=error):
            texts(open_files(write(tmp_path, name, content), "text"))
    finally:
        csv.field_size_limit(limit)


def test_a_device_in_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", b"text")
    (tmp_path / "b").symlink_to("/dev/zero")  # without a suffix of text it is left out
    os.mkfifo(tmp_path / "pipe")
    with time_limit():
        assert texts(open_files(tmp_path, "text")) == ["text"]
    for name in ("c.txt", "c.jsonl", "c.parquet"):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(DataError, match=rf"{name}: cannot be read \(it is a device"):
            open_files(tmp_path, "text")
        with pytest.raises(DataError, match=rf"{name}: cannot be read \(it is a device"):
            open_files(tmp_path / name, "text")
        (tmp_path / name).unlink()


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize(
    ("kind", "longest", "complaint"),
    [
        ("txt", 99, "one document of over 99 bytes: divide it"),
        ("jsonl", 115, "line 2 has more than 115 bytes"),
    ],
)
def test_a_document_that_would_fill_the_memory_is_refused_by_name(
    kind: str, longest: int, complaint: str, compression: str, tmp_path: Path
) -> None:
    text = "x" * 100
    content = text.encode() if kind == "txt" else lines("first", text)
    path = write(tmp_path, f"a.{kind}{compression}", COMPRESS[compression](content))
    module = "nsa.data.files"
    limits = {"MAX_FILE_BYTES": longest, "MAX_LINE_BYTES": longest}
    refused = rf"{path.name}: cannot be read \({complaint}"
    with mock.patch.multiple(module, **limits), pytest.raises(DataError, match=refused):
        texts(open_files(path, "text"))
    with mock.patch.multiple(module, **dict.fromkeys(limits, longest + 20)):
        assert texts(open_files(path, "text"))[-1] == text


def test_a_pattern_can_be_set_without_quotes() -> None:
    """In YAML it would start an alias."""
    config = resolve_config(RunConfig(), assignments=["data.pattern=*.md"])
    assert config.data.pattern == "*.md"


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"x = {name!r}\n")


def test_the_embedded_text_is_that_of_the_pinned_package() -> None:
    """Published figures were measured on it."""
    assert "\ndeepspeed==0.19.8\n" in (ROOT / "launch/constraints.txt").read_text()
    published = "41e964af0aa9ea1ca3f3999ac56c65fa4aa0b4cd9886c1702ebd51f3b4cbcba6"
    assert embedded().content == published


def test_files_are_sorted_by_path_without_what_an_installation_writes(tmp_path: Path) -> None:
    kept = ["abc.py", "runtime/a.py", "runtime/zero/b.py", "runtime_a.py", "zlib.py"]
    touch(tmp_path, *reversed(kept))
    (tmp_path / "runtime/__init__.py").write_text("")
    published = python_files(tmp_path, "py")
    touch(tmp_path, "git_version_info_installed.py", "runtime/__pycache__/a.pyc", "notes.txt")
    documents = python_files(tmp_path, "py").read_all()
    assert [document.location for document in documents] == sorted(kept)
    assert contents_of(python_files(tmp_path, "py"))[0] == b"x = 'abc.py'\n"
    assert python_files(tmp_path, "py").content == published.content
    (tmp_path / "abc.py").write_text("y")
    assert python_files(tmp_path, "py").content != published.content


def test_an_installed_package_is_a_source_and_another_name_is_refused() -> None:
    tokens = open_store(DataConfig(source="embedded:tensorboard"), "train")
    assert len(tokens) > 100_000
    names = embedded("tensorboard").name, embedded().name
    assert names == ("embedded:tensorboard", "embedded"), "as in data.source"
    for missing in ("no_such_package", "../secrets", "tensorboard.summary", "argparse"):
        expected = f"data.source = 'embedded:{missing}': '{missing}' is not an installed package; "
        with pytest.raises(DataError, match=re.escape(expected)):
            open_store(DataConfig(source=f"embedded:{missing}"), "train")


def test_the_synthetic_text_is_that_of_earlier_versions() -> None:
    digest = hashlib.sha256(b"\0".join(contents_of(synthetic())))
    assert digest.hexdigest()[:16] == "50e7db4fd4812e31"


def test_a_pass_over_synthetic_text_resumes_after_any_document() -> None:
    assert check_resumption(synthetic(20_000)) == contents_of(synthetic(20_000))


BROKEN = 6  # lines, rows and files of `folder` that cannot be read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight files, of which five have a broken line or a broken end."""
    root = tmp_path_factory.mktemp("text")
    good = lines(*(f"a {number}" for number in range(30))).splitlines(keepends=True)
    write(root, "a.jsonl", b"".join([*good[:9], b"{broken\n", *good[9:], b'{"body": "x"}\n']))
    archive = gzip.compress(lines(*("b" * 99 for _ in range(40_000))))
    write(root, "b.jsonl.gz", archive[: len(archive) // 2])
    write(root, "c.parquet", b"PAR1 and no more")
    table = pa.table({"text": [f"d {number:04} {'.' * 50}" for number in range(1_000)]})
    pq.write_table(table, root / "d.parquet", row_group_size=150, compression="none")
    data = bytearray((root / "d.parquet").read_bytes())
    begin = pq.ParquetFile(root / "d.parquet").metadata.row_group(3).column(0).data_page_offset
    data[begin : begin + 40] = b"\xff" * 40  # the fourth group's page header
    write(root, "d.parquet", data)
    write(root, "e.jsonl", lines("e 1", "e 2") + b"[1]\n")
    write(root, "f.txt", b"f")
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
    write(tmp_path, "a.txt", b"a")
    write(tmp_path, "b.parquet", (folder / "c.parquet").read_bytes())
    (_, _), (error, cursor) = open_skipping(tmp_path).read()
    assert isinstance(error, DataError)
    assert list(open_skipping(tmp_path).read(cursor)) == []


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
    good = lines(*map(str, range(20 if few else 500)))
    path = write(tmp_path, "a.jsonl", b"{broken\n[1]\n" + good)
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
