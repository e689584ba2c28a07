"""Environment variables are the documented ones and no others."""

from __future__ import annotations

import re

from tests.ranks import ROOT


def test_the_code_reads_the_variables_that_the_page_lists_and_no_others() -> None:
    """Runs of the earlier system depended on six variables of its own."""
    page = (ROOT / "docs/reference/cli.md").read_text()
    section = page.partition("## Environment variables\n")[2].partition("\n## ")[0]
    read = set()
    for folder in ("nsa", "recipes"):
        for source in (ROOT / folder).rglob("*.py"):
            lines = [line for line in source.read_text().splitlines() if "environ" in line]
            read |= set(re.findall(r'"([A-Z_]+)"', "".join(lines)))
    assert read == set(re.findall(r"`([A-Z_]+)`", section))
