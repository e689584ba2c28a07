"""Installed recipes and DeepSpeed configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.resources import existing_or_resource
from tests.ranks import ROOT


def test_a_flag_names_the_installed_file_unless_there_is_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "ds_configs/zero1_pcie.json"
    assert existing_or_resource(name) == ROOT / name
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / name).write_text("{}")
    assert existing_or_resource(name) == Path(name)
    assert existing_or_resource("none.json") == Path("none.json")
