"""Package imports and environment variables are the documented ones and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import name
from tests.ranks import ROOT

ROW = re.compile(
    r"^\| `nsa/(\w+)(?:/|\.py)` \| .* \| (.*) \|$", re.M
)  # package | content | may import


def package(module: str) -> str | None:
    """Return the package or top-level module of `nsa` that a module belongs to."""
    top, _, rest = module.partition(".")
    return rest.split(".")[0] or None if top == "nsa" else None


def imported(source: Path) -> set[str]:
    """Return the packages that a file imports from, late imports included."""
    packages: set[str | None] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            packages |= {package(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "nsa":
            packages |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(package(node.module))
    return {other for other in packages if other}


def test_packages_import_only_what_the_page_allows() -> None:
    page = (ROOT / "docs/design/architecture.md").read_text()
    allowed = {name: set(re.findall(r"\w+", others)) for name, others in ROW.findall(page)}
    paths = [path for path in (ROOT / "nsa").iterdir() if path.is_dir() or path.suffix == ".py"]
    assert set(allowed) == {path.stem for path in paths if not path.stem.startswith("_")}
    for source in (ROOT / "nsa").rglob("*.py"):
        here = source.relative_to(ROOT / "nsa").parts[0].removesuffix(".py")
        if here in allowed and allowed[here] != {"any"}:
            assert imported(source) <= allowed[here] | {here}, name(source)


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
