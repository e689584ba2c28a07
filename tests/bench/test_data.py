"""`nsa bench data` runs at a tiny size and saves every figure that the page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.bench import data
from nsa.bench.__main__ import main


@pytest.mark.full
def test_data_measures_preparing_tokenising_and_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SEQ_LEN", 128), ("MEGABYTES", 1), ("SECONDS", 0.01)):
        monkeypatch.setattr(data, name, value)
    main(["data", f"--out={tmp_path / 'data.json'}"])
    result = json.loads((tmp_path / "data.json").read_text())
    assert result["finished"]
    assert set(result["tokenise_mb_per_s"]) == {"byte", "bpe"}
    assert set(result["tokens_per_s"]) == {"prepared", "streamed"}
    assert result["prepare_mb_per_s"] > 0
