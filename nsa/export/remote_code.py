"""Remote code for transformers (trust_remote_code): the model's modules flattened into one folder.

    nsa/model/hf.py               modeling_nsa.py            the names in config.json's auto_map
    nsa/model/hf_config.py        configuration_nsa.py
    nsa/ops/triton/band.py        nsa_ops_triton_band.py     all others by their dotted names

Only three things in a module change: imports of this package become relative, optional packages are
imported inside `try`, and custom ops get another namespace. The output is deterministic.
"""

from __future__ import annotations

import ast
import hashlib
import re
from importlib.util import find_spec
from pathlib import Path

CONFIGURATION, MODELING = "nsa.model.hf_config", "nsa.model.hf"
FILE_NAMES = {CONFIGURATION: "configuration_nsa", MODELING: "modeling_nsa"}
AUTO_MAP = {
    "AutoConfig": f"{FILE_NAMES[CONFIGURATION]}.NSAConfig",
    "AutoModelForCausalLM": f"{FILE_NAMES[MODELING]}.NSAForCausalLM",
}
# transformers requires every package that a file imports outside of a `try`, even in a function.
OPTIONAL = {"triton", "deepspeed", "flash_attn"}
HEADER = """\
# From Native Sparse Attention's package `nsa`, {module}, by `nsa export`; Apache License 2.0.
# Its imports are rewritten to work in one folder; change the package rather than this file.

"""


def remote_code() -> dict[str, str]:
    """Return the name and text of each file that the model needs."""
    pending, texts = [CONFIGURATION, MODELING], dict[str, str]()
    while pending:
        module = pending.pop()
        if module not in texts:
            texts[module], imported = _flatten(_source(module).read_text(encoding="utf-8"))
            pending += imported
    # Ops are registered per process: another version's ops need another namespace.
    everything = "".join(texts[module] for module in sorted(texts))
    namespace = f"nsa_{hashlib.sha256(everything.encode()).hexdigest()[:8]}"
    return {
        f"{_file_name(module)}.py": HEADER.format(module=module) + _rename_ops(text, namespace)
        for module, text in sorted(texts.items())
    }


def _source(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def _file_name(module: str) -> str:
    return FILE_NAMES.get(module, module.replace(".", "_"))


def _flatten(text: str) -> tuple[str, list[str]]:
    """Rewrite a module's imports; also return the modules of this package that it imports."""
    lines, imported = text.splitlines(keepends=True), list[str]()
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        roots = _packages(node)
        if isinstance(node, ast.ImportFrom) and node.module is not None and roots == {"nsa"}:
            modules = _imported_modules(node, node.module)
            imported += modules or [node.module]
            if not modules:
                first = lines[node.lineno - 1]
                relative = f".{_file_name(node.module)}"
                lines[node.lineno - 1] = first.replace(node.module, relative, 1)
                continue
            new = []  # `from nsa.ops import triton`
            for module, alias in zip(modules, node.names, strict=True):
                file = _file_name(module)  # transformers copies only files imported *from*
                new += [f"from .{file} import __name__ as _"]
                new += [f"from . import {file} as {alias.asname or alias.name}"]
        elif roots & OPTIONAL:
            new = ["try:", f"    {ast.unparse(node)}", "except ImportError:", "    raise"]
        else:
            continue
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}\n" for line in new]
    return "".join(lines), imported


def _packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The top-level packages that a statement imports from."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
    return {(name or "").partition(".")[0] for name in names}


def _imported_modules(node: ast.ImportFrom, package: str) -> list[str]:
    """The submodules that a statement imports; it must not mix them with other names."""
    if _source(package).name != "__init__.py":
        return []
    names = [f"{package}.{alias.name}" for alias in node.names]
    modules = [name for name in names if find_spec(name) is not None]
    assert modules in ([], names), f"{ast.unparse(node)}: import modules in a separate statement"
    return modules


def _rename_ops(text: str, namespace: str) -> str:
    return re.sub(r'(?<=")nsa(?=::)|(?<=torch\.ops\.)nsa(?=\.)', namespace, text)
