"""Paths of recipes and DeepSpeed configs, in a clone or an installed wheel."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def resource_path(name: str) -> Path:
    """Return the path of `recipes/…` or `ds_configs/…`.

    A wheel installs both in `share/nsa-m7c/`: beside the package with `pip install --target`, in a
    parent folder with --user or --prefix.
    """
    parents = Path(__file__).resolve().parents
    roots = (*parents, Path(sysconfig.get_path("data")))
    candidates = [parents[1] / name, *(root / "share" / "nsa-m7c" / name for root in roots)]
    return next((path for path in candidates if path.exists()), candidates[-1])


def existing_or_resource(text: str) -> Path:
    """Return the path that a flag names; without a clone, `ds_configs/…` is the installed file."""
    path, found = Path(text), resource_path(text)
    shipped = path.parts[:1] in (("recipes",), ("ds_configs",)) and found.exists()
    return found if shipped and not path.exists() else path
