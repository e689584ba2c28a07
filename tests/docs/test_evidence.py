"""The page of evidence links every page of figures, and repeats their figures exactly."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import name
from tests.ranks import ROOT

EVIDENCE = ROOT / "docs/design/evidence.md"
FIGURES = sorted((ROOT / "docs/benchmarks").glob("*.md"))
# A row: claim, figure, page.
ROW = re.compile(r"^\| (.+?) \| (.+?) \| \[[^]]+\]\(\.\./benchmarks/([\w-]+\.md)\S*\) \|$", re.M)
ROWS = ROW.findall(EVIDENCE.read_text())


def test_every_page_of_figures_is_linked() -> None:
    text = EVIDENCE.read_text()
    assert [name(page) for page in FIGURES if f"(../benchmarks/{page.name}" not in text] == []


@pytest.mark.parametrize(("claim", "figure", "page"), ROWS, ids=[row[0][:40] for row in ROWS])
def test_a_figure_stands_on_the_page_that_its_row_links(claim: str, figure: str, page: str) -> None:
    text = (ROOT / "docs/benchmarks" / page).read_text()
    numbers = re.findall(r"\d[\d,]*\.\d+%?|\d+,\d{3}", figure)
    missing = [
        number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text)
    ]
    assert not missing, f"{claim}: {page} lacks {missing}"


def test_the_pages_figures_were_found() -> None:
    assert len(ROWS) > 20
