"""The site builds without warnings, every setting is explained, and the pages stay few."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import nsa.ops
from tests.docs.pages import name
from tests.ranks import ROOT

SITE = ROOT / "docs/site/mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `mkdocs build --strict` builds it, without its search and sources."""
    reason = "the extra `docs` is not installed: pip install -e '.[docs]'"
    for needed in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(needed, reason=reason)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.utils import yaml_load

    to = tmp_path_factory.mktemp("site")
    search, api = yaml_load(SITE.read_text())["plugins"]
    assert search == "search"
    api["mkdocstrings"]["handlers"]["python"]["options"]["show_source"] = False
    config = load_config(str(SITE), site_dir=str(to), strict=True, plugins=[api])
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)  # raises after a warning
    config.plugins.run_event("shutdown")
    return to


def test_it_builds_without_warnings_and_loads_nothing_from_the_network(site: Path) -> None:
    start = (site / "index.html").read_text()
    assert "<h1" in start
    assert "Native Sparse Attention" in start
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:link|script|img)[^>]+(?:href|src)="(https?:[^"]+)', page.read_text()
        )
        assert not fetched, page


def test_lists_and_tables_render(site: Path) -> None:
    """Python's Markdown needs a blank line before a list, GitHub does not."""
    for page in site.rglob("*.html"):
        paragraphs = re.findall(r"(?s)<p>(.*?)</p>", page.read_text())
        broken = [one for one in paragraphs if re.search(r"^(- |\| |\d+\. |```)", one, re.M)]
        assert not broken, (page, broken[0])


def test_the_settings_page_is_up_to_date_and_explains_every_setting() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs/make_settings.py")
    make_settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_settings)
    page = make_settings.page()
    assert make_settings.PAGE.read_text() == page, "run: python docs/make_settings.py"
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.M)
    assert 60 < len(rows) <= 80
    assert [name for name, meaning in rows if not meaning] == []


def test_every_public_function_on_tensors_is_in_the_reference(site: Path) -> None:
    page = (site / "docs/reference/api.html").read_text()
    for function in nsa.ops.__all__:
        if function != "NSASpec":
            assert f'id="nsa.ops.{function}"' in page


WORDS = 32_000  # of all pages; figures are on the pages of docs/benchmarks
LONGEST = {"docs/CHANGELOG.md": 900, "docs/**/*.md": 2_050}  # words of a page


def test_the_documentation_stays_small() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert len([page for page in pages if page.parent.name != "benchmarks"]) <= 30
    assert (ROOT / "README.md").read_text().count("\n") <= 150
    assert sum(len(page.read_text().split()) for page in pages) <= WORDS
    for pattern, limit in LONGEST.items():
        for page in ROOT.glob(pattern):
            words = len(page.read_text().split())
            assert words <= limit, f"{name(page)}: {words} words, at most {limit}"
