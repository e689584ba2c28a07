"""The pages build into a site: no dead link, no page in no menu, and every setting explained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import nsa.ops
from nsa.engine.config import RunConfig
from tests.ranks import ROOT

SITE = ROOT / "docs/site/mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `mkdocs build --strict` does it."""
    why = "the extra `docs` is not installed: pip install -e '.[docs]'"
    for needed in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(needed, reason=why)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    to = tmp_path_factory.mktemp("site")
    config = load_config(str(SITE), site_dir=str(to), strict=True)
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)  # raises where there was a warning
    config.plugins.run_event("shutdown")
    return to


def settings(config: object) -> Iterator[tuple[type, str]]:
    """Each setting of a tree, with the dataclass that it is a field of."""
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from settings(value)
        else:
            yield type(config), field.name


def test_it_is_built_without_a_warning_and_fetches_nothing(site: Path) -> None:
    start = (site / "index.html").read_text()
    assert "<h1" in start
    assert "Native Sparse Attention" in start
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:link|script|img)[^>]+(?:href|src)="(https?:[^"]+)', page.read_text()
        )
        assert not fetched, page


def test_lists_and_tables_are_shown_as_such(site: Path) -> None:
    """GitHub begins a list below a paragraph's last line; Python's Markdown wants a blank one."""
    for page in site.rglob("*.html"):
        paragraphs = re.findall(r"(?s)<p>(.*?)</p>", page.read_text())
        broken = [one for one in paragraphs if re.search(r"^(- |\| |\d+\. |```)", one, re.M)]
        assert not broken, (page, broken[0])


def test_every_setting_is_on_its_page_with_what_it_means(site: Path) -> None:
    page = (site / "docs/api/settings.html").read_text()
    found = list(settings(RunConfig()))
    assert len(found) > 80
    for owner, name in found:
        place = f"{owner.__module__}.{owner.__name__}.{name}"
        _, there, below = page.partition(f'id="{place}"')
        assert there, place
        assert "<p>" in below.partition("doc-object ")[0], f"{place} has no comment on its line"


def test_every_public_function_on_tensors_is_in_the_reference(site: Path) -> None:
    page = (site / "docs/api/ops.html").read_text()
    for name in nsa.ops.__all__:
        if name != "NSASpec":
            assert f'id="nsa.ops.{name}"' in page
