"""Imports of `nsa.data`: no other package and no DeepSpeed, so that workers start quickly."""

from __future__ import annotations

import subprocess
import sys

LIST_PACKAGES = """
import sys, nsa.data
modules = {name: module for name, module in sys.modules.items() if name.startswith("nsa.")}
packages = {name.split(".")[1] for name, module in modules.items() if hasattr(module, "__path__")}
print(*sorted(packages - {"data"}), *{"torch", "deepspeed"} & sys.modules.keys())
"""


def test_importing_data_loads_no_other_package_and_neither_torch_nor_deepspeed() -> None:
    command = [sys.executable, "-c", LIST_PACKAGES]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
