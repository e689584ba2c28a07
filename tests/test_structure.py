"""Source tree: import layers by the design page's table, no cycles, docstrings, file lengths."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter

from tests.ranks import ROOT

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "nsa").rglob("*.py"))
}
PAGE = ROOT / "docs/design/architecture.md"
# | `nsa/package/` | content | packages that it may import, all of them in rows above |
ROW = re.compile(r"^\| `nsa/(\w+)(?:/|\.py)` \| .* \| (.*) \|$", re.MULTILINE)
LAYERS = {package: re.findall(r"\w+", below) for package, below in ROW.findall(PAGE.read_text())}
ENTRY_POINTS = "nsa", "nsa.__main__"  # which give users names of any layer


def package_of(module: str) -> str:
    return module.removeprefix("nsa").strip(".").split(".")[0]


@cache
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


def test_each_package_has_a_row_below_those_that_it_may_import() -> None:
    assert LAYERS.keys() == {package_of(module) for module in SOURCES.keys() - {*ENTRY_POINTS}}
    packages = list(LAYERS)
    for number, (package, below) in enumerate(LAYERS.items()):
        upward = {*below} - {"any", *packages[:number]}
        assert not upward, f"{PAGE.name}: {package} may import {upward}, which are not above it"


def test_a_module_imports_only_what_the_row_of_its_package_allows() -> None:
    for module in SOURCES.keys() - {*ENTRY_POINTS}:
        here = package_of(module)
        wrong = [x for x in imports(module) if not {package_of(x), "any"} & {here, *LAYERS[here]}]
        assert not wrong, f"{module} imports {wrong}: {here} may not, by {PAGE.name}"


def test_a_module_has_a_docstring_and_at_most_700_lines() -> None:
    for module, path in SOURCES.items():
        text = path.read_text()
        assert not text or ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
        assert text.count("\n") <= 700, f"{module} has more than 700 lines"
