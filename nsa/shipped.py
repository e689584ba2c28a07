"""Where recipes and DeepSpeed's JSON files lie: beside the package in a clone, else installed."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def shipped(name: str) -> Path:
    """The place of `recipes/…` or `ds_configs/…`; a wheel puts both below `share/nsa-m7c/`."""
    clone = Path(__file__).resolve().parents[1] / name
    installed = Path(sysconfig.get_path("data")) / "share" / "nsa-m7c" / name
    return clone if clone.exists() else installed
