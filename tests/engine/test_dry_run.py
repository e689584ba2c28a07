"""Dry run: what is printed before its step."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from nsa.engine import dry_run
from tests.engine.small import small_request


def test_notes_and_settings_are_printed_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Mock(side_effect=TimeoutError)
    monkeypatch.setattr(dry_run, "start_ranks", lambda ranks: "cpu")
    monkeypatch.setattr(dry_run, "build_engine", lambda *_: (engine, ["a note"]))
    monkeypatch.setattr(dry_run, "_check_data", lambda *_: ["about the data"])
    with pytest.raises(TimeoutError):
        dry_run.dry_run(small_request(f"--run-dir={tmp_path}", "--set=data.seq_len=64"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "taking one step of 2,048 tokens …"
    for line in ("a note", "about the data", "# configuration (demo)", "# DeepSpeed"):
        assert line in lines
    assert "tokens per step     2,048" in lines
