"""`nsa eval`: the keys of `--json`, and data that is opened once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.cli import main
from tests.data.texts import names_of_counted, texts, write_lines
from tests.evaluate.models import write_model

ROW = {
    *("run", "place", "step", "trained_seq_len", "seq_len", "tokens", "samples"),
    *("loss", "standard_error", "perplexity", "bits_per_byte", "bytes_per_token"),
    *("over", "positions"),
}


def test_json_is_eval_json_alone_on_stdout_with_stable_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "lines.jsonl", texts(300, 200))
    models = [str(write_model(tmp_path / name)) for name in ("one", "other")]
    flags = ["--compare", models[1], "--source", source, "--seq-len=64", "--tokens=640", "--json"]
    assert main(["eval", models[0], *flags]) == 0
    output = capsys.readouterr()
    tree = json.loads(output.out)
    folder = tmp_path / "one/eval"  # of the first run, without --out
    assert tree == json.loads((folder / "eval.json").read_text())
    assert {"eval.json", "positions.png"} == {path.name for path in folder.iterdir()}
    assert "640 tokens in 10 samples" in output.err
    assert tree.keys() == {"text", "results"}
    assert tree["text"] == {"source": source, "split": "all", "packing": "concat"}
    first, second = tree["results"]
    assert first.keys() == second.keys() == ROW
    assert (first["run"], first["seq_len"], first["tokens"]) == ("one", 64, 640)
    assert (first["step"], first["over"]) == (None, None)
    assert second["over"].keys() == {"run", "seq_len", "loss", "standard_error"}
    assert second["over"]["run"] == "one"
    assert {key for bucket in first["positions"] for key in bucket} == {
        *("first", "last", "tokens", "loss", "standard_error")
    }


def test_documents_are_counted_once_for_all_runs_on_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "lines.jsonl", texts(300, 200))
    runs = [write_model(tmp_path / name, f"data.source={source}") for name in ("one", "other")]
    counted = names_of_counted(monkeypatch)
    assert main(["eval", str(runs[0]), "--compare", str(runs[1]), "--tokens=192"]) == 0
    assert "split held_out" in capsys.readouterr().out
    assert counted == [source]
