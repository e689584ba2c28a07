"""The soak test finds a row that differs; the fault injection itself runs with --full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import Soak, kill_one_rank, run_and_compare


@pytest.mark.full
def test_a_run_under_faults_computes_what_an_undisturbed_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.faults.soak.FAULTS", [kill_one_rank])
    soak = Soak(tmp_path, 0, None)
    run_and_compare(soak, minutes=0.3)
    assert soak.faults.total() >= 1
