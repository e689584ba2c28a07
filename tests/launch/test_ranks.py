"""`tests.ranks.launch`, with which other tests start ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.ranks import RanksFailed, launch


def write(folder: Path, code: str) -> Path:
    path = folder / "code.py"
    path.write_text(code)
    return path


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_rank_gets_its_number_and_stdout_comes_back_in_rank_order(tmp_path: Path) -> None:
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"
    code = write(
        tmp_path, f"import os, sys\nprint(*(os.environ[name] for name in {names}), sys.argv[1:])"
    )
    assert launch(code, "a", "b", world_size=3) == [
        f"{rank} {rank} 3 127.0.0.1 1 ['a', 'b']\n" for rank in range(3)
    ]


def test_ranks_meet_in_a_collective(tmp_path: Path) -> None:
    code = write(
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([dist.get_rank() + 1])\n"
        "dist.all_reduce(x)\n"
        "print(x.item())\n"
        "dist.destroy_process_group()\n",
    )
    assert launch(code, timeout=120) == ["3\n", "3\n"]


def test_a_failure_shows_what_each_rank_wrote_and_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ranks.GRACE", 0.5)
    code = write(
        tmp_path,
        "import os, time\n"
        "print('pid', os.getpid())\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise SystemExit('the reason')\n"
        "time.sleep(600)\n",
    )
    with pytest.raises(RanksFailed, match="rank 1 failed with exit code 1") as failure:
        launch(code)
    message = str(failure.value)
    assert "the reason" in message
    pids = [int(line.split()[1]) for line in message.splitlines() if line.startswith("pid")]
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_a_time_out_also_ends_the_processes_that_a_rank_started(tmp_path: Path) -> None:
    code = write(
        tmp_path,
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('pid', child.pid)\n"
        "time.sleep(600)\n",
    )
    with pytest.raises(RanksFailed, match="these ranks still ran: \\[0\\]") as failure:
        launch(code, world_size=1, timeout=1)
    (child,) = (line.split()[1] for line in str(failure.value).splitlines() if "pid" in line)
    for _ in range(100):
        if not alive(int(child)):
            break
        time.sleep(0.05)
    assert not alive(int(child))
