"""Pages: what they refer to exists, the site builds, every setting is explained, they stay few."""

import fnmatch
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import nsa.ops
from nsa.engine.config import RunConfig, resolve_config
from nsa.withdrawn import SETTINGS, VALUES
from tests.docs.pages import PAGES, name, prose
from tests.ranks import ROOT

FOLDERS = ("nsa", "ds_configs", "recipes", "launch", "tests", "docs", ".ci")
SECTIONS = ("model", "data", "train", "monitor", "checkpoint")
CHANGELOG = ROOT / "docs/CHANGELOG.md"  # names what was renamed or removed


def quoted(page: Path) -> Iterator[str]:
    """Yield the words between backticks, except what the changelog lists as withdrawn."""
    text = re.sub(r"### Withdrawn.*?(?=\n### )", "", prose(page), flags=re.S)
    for code in re.findall(r"`([^`\n]+)`", text):
        yield from code.split()


@cache
def files() -> list[str]:
    """Return every path below FOLDERS, and every path in the repository's root."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return [name(path) for path in (*inside, *ROOT.glob("*"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_and_tests_exist(page: Path) -> None:
    """`nsa/ops/` from the root, `loop.py` anywhere, `<name>` and `*` for anything."""
    for word in quoted(page):
        path, _, test = word.partition("::")
        if re.fullmatch(r"[\w.\-/<>*]+", path) is None:
            continue
        in_a_folder = path.split("/")[0] in FOLDERS and "/" in path
        if not in_a_folder and not path.endswith((".py", ".sh")):
            continue
        pattern = re.sub(r"<\w+>", "*", path).rstrip("/")
        matches = fnmatch.filter(files(), pattern if in_a_folder else f"*/{pattern}")
        assert matches, word
        if test:
            assert re.search(rf"^def {test}\(", (ROOT / matches[0]).read_text(), re.M), word


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHANGELOG], ids=name)
def test_names_in_the_code_exist(page: Path) -> None:
    for word in quoted(page):
        if re.fullmatch(r"nsa(\.\w+)+", word):
            pkgutil.resolve_name(word)


def test_functions_have_the_parameters_that_the_page_of_the_api_shows() -> None:
    rows = re.findall(
        r"^\| `(\w+)(\(.+?\))` \|", (ROOT / "docs/reference/api.md").read_text(), re.M
    )
    assert len(rows) >= 8
    for function, shown in rows:
        signature = inspect.signature(getattr(nsa.ops, function))
        plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        bare = signature.replace(parameters=plain, return_annotation=signature.empty)
        assert shown == str(bare), function


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_settings_exist_and_take_the_values_that_are_shown(page: Path) -> None:
    for word in quoted(page):
        setting, _, value = word.partition("=")
        section, *names = setting.split(".")
        if section not in SECTIONS or not names or names[-1] in ("py", "json", "safetensors"):
            continue
        if page.name == "CHANGELOG.md" and (setting in SETTINGS or (setting, value) in VALUES):
            continue
        node: object = RunConfig()
        for part in setting.split("."):
            assert hasattr(node, part), word
            node = getattr(node, part)
        if value:
            resolve_config(RunConfig(), assignments=[f"{setting}={value}"])


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
    assert 60 < len(rows) <= 80, "a run may have 80 settings: withdraw one for a new one"
    unexplained = [name for name, meaning in rows if not meaning]
    assert unexplained == [], "add a comment beside or above the field"


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
    total = sum(len(page.read_text().split()) for page in pages)
    assert total <= WORDS, f"README and docs: {total} words, at most {WORDS}; shorten a page"
    for pattern, limit in LONGEST.items():
        for page in ROOT.glob(pattern):
            words = len(page.read_text().split())
            assert words <= limit, f"{name(page)}: {words} words, at most {limit}"
