"""`launch/watch.sh`: the watchdog of this project's own .venv, from wherever it is called."""

from __future__ import annotations

from pathlib import Path

from tests.launch.clone import run


def test_arguments_go_to_the_watchdog_and_its_exit_code_comes_back(
    installed_clone: Path,
) -> None:
    call = run(installed_clone, "watch.sh", "--restart", "2", "--", "sh", "-c", "echo a b; exit 3")
    assert call.returncode == 3, call.stderr
    assert call.stdout.splitlines() == [
        "called with ['watch', '--restart', '2', '--', 'sh', '-c', 'echo a b; exit 3']",
        "a b",
    ]
