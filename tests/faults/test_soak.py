"""The soak test finds a row that differs; the fault injection itself runs with --full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import Soak, compare, kill_one_rank, run_and_compare


def test_a_row_that_differs_or_is_missing_is_found() -> None:
    golden = {step: [64.0 * step, 5.0 / step, None] for step in range(1, 6)}
    rows = {step: golden[step] for step in (1, 2, 4)}
    assert compare(rows, golden) == ([], [3])
    rows[2] = [128.0, 2.5000000001, None]
    assert compare(rows, golden) == ([2], [3])


@pytest.mark.full
def test_a_run_under_faults_computes_what_an_undisturbed_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.faults.soak.FAULTS", [kill_one_rank])
    soak = Soak(tmp_path, 0, None)
    run_and_compare(soak, minutes=0.3)
    assert soak.faults.total() >= 1
