"""Source tree: no import cycles, no words of the early dialect, docstrings and file lengths."""

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
# Words of this project's early dialect, and the words that readers grep for instead.
DIALECT = {
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again",
    r"whoever": "any, whatever",
    r"beforehand": "in advance",
    r"thereby": "so",
    r"gone[ _]on": "resumed, continued",
    r"so[ _]many": "at most N, N",
    r"mourn(s|ed|ing)?": "lost peer, grace period",
    r"lived[ _]with": "tolerated",
    r"in[ _]that[ _]of": "relative to",
    r"unturned": "pre-RoPE",
}
EXEMPT = (Path(__file__), ROOT / "docs/CHANGELOG.md")  # they name the words that were replaced
FOLDERS = ("nsa", "recipes", "launch", "docs", "tests", "ds_configs")


def imports(module: str) -> set[str]:
    """Return the modules of `nsa` that a module imports, also late or for type checking alone."""
    names = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= submodules & SOURCES.keys() or {node.module}
    return names & SOURCES.keys() - {module}


def test_imports_form_no_cycle() -> None:
    """`static_order` raises a CycleError that lists the modules of a cycle."""
    graph = {module: imports(module) for module in SOURCES}
    assert set(TopologicalSorter(graph).static_order()) == SOURCES.keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_uses_a_word_of_the_dialect(folder: str) -> None:
    """Words inside of identifiers included."""
    dialect = re.compile(rf"(?<![a-z])({'|'.join(DIALECT)})(?![a-z])", re.IGNORECASE)
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".md", ".sh", ".yml", ".sbatch") or path in EXEMPT:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = dialect.search(line)
            assert match is None, f"{path.relative_to(ROOT)}:{number}: {match[0]!r}"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_has_a_docstring_and_at_most_700_lines(module: str) -> None:
    text = SOURCES[module].read_text()
    assert not text or ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
    assert text.count("\n") <= 700, f"{module} has more than 700 lines"
