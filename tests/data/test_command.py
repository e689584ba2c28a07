"""`nsa data`: the output of each action, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.cli import main
from nsa.data.builtin import synthetic
from tests.disks import flip_a_bit


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    lines = [
        json.dumps({"body": document.text.decode()}) for document in synthetic(60_000).read_all()
    ]
    path.write_text("\n".join(lines))
    return path


def call(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


def test_prepare_and_check_report_contents_and_damage(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("HOME", str(tmp_path))
    source = ("--source", texts, "--text-field", "body")
    prepare = ("prepare", *source, "--tokenizer", "byte", "--out=~/out", "--held-out", "0.1")
    assert call(*prepare) == 0
    output = capsys.readouterr()
    assert f"{out} is finished\ntrain: " in output.out
    assert "60.0k/" in output.err or "60.0kB" in output.err  # the bar
    assert call(*prepare) == 0
    assert f"{out} was already finished\n" in capsys.readouterr().out
    again = ("--source", out, "--tokenizer", "byte", "--out", tmp_path / "again")
    assert call("prepare", *again) == 2
    message = f"nsa: --source = '{out}': is prepared already; train on it\n"
    assert capsys.readouterr().err == message

    assert call("check", "~/out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out}: source {texts}, tokenizer byte; intact"
    assert lines[1].startswith("train: ")
    assert lines[2].startswith("val: ")
    assert lines[2].endswith(" in 1 shard")

    shard = out / "val-000-00000.bin"
    flip_a_bit(shard)
    assert call("check", out) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"nsa: {shard}: its content changed since it was written")
    assert output.err.count("\n") == 1


def test_the_contents_of_each_split_are_reported_also_of_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(1_000)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    source = ("--source", tmp_path / "many.jsonl", "--tokenizer", "byte", "--held-out", "1e-9")
    flags = ("--out", tmp_path / "out", "--shard-tokens", 5_000)
    assert call("prepare", *source, *flags) == 2
    assert "val: no documents, so no run can use" in capsys.readouterr().out
    assert call("check", tmp_path / "out") == 0
    train, val = capsys.readouterr().out.splitlines()[1:]
    assert train == (
        "train: 12,890 tokens of 1,000 documents and 11,890 bytes, 0.92 bytes a token, in 3 shards"
    )
    assert "data.held_out was 1e-09" in val


def test_mistakes_are_one_line_and_exit_code_2(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    for arguments, expected in (
        (["prepare", "--source", texts, "--tokenizer", "byte", *out], "--text-field"),
        (["prepare", "--source", "synthetic", "--tokenizer", "word", *out], "--tokenizer"),
        (["check", tmp_path / "nowhere"], "nowhere"),
    ):
        assert call(*arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = (line for line in output.err.splitlines() if line.startswith("nsa: "))
        assert expected in line
