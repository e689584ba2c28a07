"""The room's walls: data knows no other part of the house."""

from __future__ import annotations

import subprocess
import sys

LIST_STRANGERS = """
import sys, nsa.data
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("nsa.")}
print(*sorted(rooms - {"data"}), *(name for name in ("deepspeed",) if name in sys.modules))
"""


def test_importing_data_loads_no_other_room_and_no_deepspeed() -> None:
    command = [sys.executable, "-c", LIST_STRANGERS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
