"""The arrows and environment variables of docs/architecture.md are the only ones in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import name
from tests.ranks import ROOT

ROW = re.compile(r"^\| `nsa/(\w+)(?:/|\.py)` \| .* \| (.*) \|$", re.M)


def room(module: str) -> str | None:
    """The room that a module of this package lives in."""
    package, _, rest = module.partition(".")
    return rest.split(".")[0] or None if package == "nsa" else None


def imported(source: Path) -> set[str]:
    """The rooms that a file imports from, wherever in it."""
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {room(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "nsa":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(room(node.module))
    return {other for other in found if other}


def test_rooms_import_what_the_page_allows_and_nothing_else() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    allowed = {room: set(re.findall(r"\w+", others)) for room, others in ROW.findall(page)}
    paths = [path for path in (ROOT / "nsa").iterdir() if path.is_dir() or path.suffix == ".py"]
    assert set(allowed) == {path.stem for path in paths if not path.stem.startswith("_")}
    for source in (ROOT / "nsa").rglob("*.py"):
        here = source.relative_to(ROOT / "nsa").parts[0].removesuffix(".py")
        if here in allowed and allowed[here] != {"any"}:
            assert imported(source) <= allowed[here] | {here}, name(source)


def test_the_code_reads_the_variables_that_the_page_lists_and_no_others() -> None:
    """F9: runs of the earlier system depended on six of their own."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("## Environment variables\n")[2].partition("\n## ")[0]
    read = set()
    for folder in ("nsa", "recipes"):
        for source in (ROOT / folder).rglob("*.py"):
            lines = [line for line in source.read_text().splitlines() if "environ" in line]
            read |= set(re.findall(r'"([A-Z_]+)"', "".join(lines)))
    assert read == set(re.findall(r"`([A-Z_]+)`", section))
