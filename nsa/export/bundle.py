"""The model's code as transformers takes it along with weights: one folder, relative imports.

    nsa/model/hf.py               modeling_nsa.py            names that config.json's auto_map has
    nsa/model/hf_config.py        configuration_nsa.py
    nsa/ops/triton/band.py        nsa_ops_triton_band.py     every other one by its dotted name

The text stays as it is but for its imports of this package, the namespace of its operations, and
imports of packages that a reader may lack. The same sources make the same files.
"""

from __future__ import annotations

import ast
import hashlib
import re
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "nsa"
IMPORTS = (ast.Import, ast.ImportFrom)
CONFIGURATION, MODELING = "nsa.model.hf_config", "nsa.model.hf"
FLAT = {CONFIGURATION: "configuration_nsa", MODELING: "modeling_nsa"}
AUTO_MAP = {
    "AutoConfig": f"{FLAT[CONFIGURATION]}.NSAConfig",
    "AutoModelForCausalLM": f"{FLAT[MODELING]}.NSAForCausalLM",
}
# transformers asks for every package that is imported outside of a `try`, wherever in a file.
OPTIONAL = {"triton", "deepspeed", "flash_attn"}
NOTE = """\
# From Native Sparse Attention's package `nsa`, {module}, by `nsa export`; Apache License 2.0.
# Its imports are rewritten to work in one folder; change the package rather than this file.

"""


def bundle() -> dict[str, str]:
    """Names and texts of all files that the model needs, without this package."""
    waiting, found = [CONFIGURATION, MODELING], dict[str, str]()
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module], needed = _flattened(module, _source(module).read_text(encoding="utf-8"))
            waiting += needed
    everything = "".join(found[module] for module in sorted(found))
    # Operations are registered by name in the whole process: other code has to have other names.
    space = f"nsa_{hashlib.sha256(everything.encode()).hexdigest()[:8]}"
    return {
        f"{_flat(module)}.py": NOTE.format(module=module) + _in_namespace(text, space)
        for module, text in sorted(found.items())
    }


def _source(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def _flat(module: str) -> str:
    return FLAT.get(module, module.replace(".", "_"))


def _flattened(module: str, text: str) -> tuple[str, list[str]]:
    """A module's text with other imports, and the modules of this package that it needs."""
    lines, needed = text.splitlines(keepends=True), list[str]()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, IMPORTS)]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        indent, own = " " * node.col_offset, slice(node.lineno - 1, node.end_lineno)
        if isinstance(node, ast.ImportFrom) and _root(node.module) == PACKAGE:
            assert node.module is not None
            wholes = _modules(node)
            if wholes:
                needed += wholes
                new = [line for alias in node.names for line in _of_module(node.module, alias)]
                lines[own] = [f"{indent}{line}\n" for line in new]
            else:
                needed.append(node.module)
                first = lines[node.lineno - 1]
                lines[node.lineno - 1] = first.replace(node.module, f".{_flat(node.module)}", 1)
        elif _roots(node) & OPTIONAL:
            new = ["try:", f"    {ast.unparse(node)}", "except ImportError:", "    raise"]
            lines[own] = [f"{indent}{line}\n" for line in new]
    return "".join(lines), needed


def _modules(node: ast.ImportFrom) -> list[str]:
    """The modules that are imported as wholes; a statement has those alone, or none."""
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    assert node.module is not None
    if not _is_package(node.module):
        return []
    found = [name for name in names if find_spec(name) is not None]
    assert found in ([], names), f"{ast.unparse(node)}: import modules by a statement of their own"
    return found


def _of_module(package: str, alias: ast.alias) -> list[str]:
    """A whole module; its file is copied only where something is imported from it."""
    flat = _flat(f"{package}.{alias.name}")
    return [
        f"from .{flat} import __name__ as _",
        f"from . import {flat} as {alias.asname or alias.name}",
    ]


def _roots(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
    return {_root(name) for name in names}


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_package(module: str) -> bool:
    return _source(module).name == "__init__.py"


def _in_namespace(text: str, space: str) -> str:
    return re.sub(r'(?<=")nsa(?=::)|(?<=torch\.ops\.)nsa(?=\.)', space, text)
