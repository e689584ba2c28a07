"""docs/benchmarks/reliability.md has a row for every fault that is tested; the soak test runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults import soak as soak_test
from tests.faults.soak import Soak, run_and_compare
from tests.faults.table import BEGIN, END, FAULTS, HEAD, PAGE


def test_the_page_has_a_row_for_each_fault_in_the_words_of_the_catalogue() -> None:
    text = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert text.startswith(HEAD)
    cells = [line.split(" | ")[:2] for line in text.removeprefix(HEAD).splitlines()]
    assert cells == [[f"| {description}", promise] for description, promise in FAULTS.values()]


def test_every_fault_of_the_catalogue_is_tested() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [fault for fault in FAULTS if not re.search(f'"{fault}"', tests)] == []


@pytest.mark.full
def test_a_run_under_faults_computes_what_an_undisturbed_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_test, "FAULTS", {"kill": soak_test.FAULTS["kill a rank"]})
    soak = Soak(tmp_path, 0, None)
    run_and_compare(soak, minutes=0.3)
    assert soak.faults.total() >= 1
