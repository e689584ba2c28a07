"""The source tree keeps its shape: imports form no cycle, and words are the field's."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.ranks import ROOT

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "nsa").rglob("*.py"))
}
# Words of this project's early dialect. Each has a plain equivalent that readers grep for.
DIALECT = {
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again",
    r"whoever": "any, whatever",
    r"beforehand": "in advance",
    r"thereby": "so",
    r"gone on( with)?": "resumed, continued",
    r"so many": "at most N, N",
    r"mourn(s|ed|ing)?": "lost peer, grace period",
    r"nobody is missed": "ranks exit independently",
    r"lived with": "tolerated",
    r"in that of": "relative to",
    r"unturned": "pre-RoPE",
}
EXEMPT = (Path(__file__), ROOT / "docs/CHANGELOG.md")  # they name the words that were replaced
READ = ("nsa", "recipes", "launch", "docs", "tests", "ds_configs")


def imports(module: str) -> set[str]:
    """The modules of this package that a module imports, also late or for type checking alone."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & SOURCES.keys() or {node.module}
    return found & SOURCES.keys() - {module}


def test_imports_form_no_cycle() -> None:
    """`static_order` raises a CycleError that lists the modules of a cycle."""
    graph = {module: imports(module) for module in SOURCES}
    assert set(TopologicalSorter(graph).static_order()) == SOURCES.keys()


@pytest.mark.parametrize("folder", READ)
def test_the_project_speaks_the_words_of_its_field(folder: str) -> None:
    dialect = re.compile(rf"\b({'|'.join(DIALECT)})\b", re.IGNORECASE)
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".md", ".sh", ".yml", ".sbatch") or path in EXEMPT:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = dialect.search(line)
            assert match is None, f"{path.relative_to(ROOT)}:{number}: {match[0]!r}"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_says_what_it_is_and_stays_short(module: str) -> None:
    text = SOURCES[module].read_text()
    assert not text or ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
    assert text.count("\n") <= 400, f"{module} has more than 400 lines"
