"""Data worker processes, seen from outside."""

from pathlib import Path

from tests.ranks import alive, wait_for


def workers_of(parent: int) -> list[int]:
    """The worker processes of a process, oldest first."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if int(stat.rpartition(")")[2].split()[1]) == parent and b"nsa.data.writer" in command:
            pids.append(int(folder.name))
    return sorted(pids)


def wait_for_end(pids: list[int]) -> None:
    wait_for(lambda: not any(map(alive, pids)))
