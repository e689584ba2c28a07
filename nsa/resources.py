"""Where recipes and DeepSpeed's JSON files lie: beside the package in a clone, else installed."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def resource_path(name: str) -> Path:
    """The place of `recipes/…` or `ds_configs/…`; a wheel puts both below `share/nsa-m7c/`.

    pip puts that beside the package (--target) or some folders above it (--user, --prefix).
    """
    above = Path(__file__).resolve().parents
    roots = (*above, Path(sysconfig.get_path("data")))
    places = [above[1] / name, *(root / "share" / "nsa-m7c" / name for root in roots)]
    return next((place for place in places if place.exists()), places[-1])
