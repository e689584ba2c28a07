"""Scripts that start a run, `launch/m7c.sh` and `m7c_pcie.sh`, and those that watch one.

Two ranks wherever it is called, their exit code, and no rank left behind.
"""

import json
import os
import re
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.launch.clone import environment, make_clone, run, start
from tests.ranks import SET_BY_LAUNCHER, alive, free_port

OF_BASH = ("PATH", "PWD", "OLDPWD", "SHLVL", "PS1", "_")  # no library reads them
OF_DEEPSPEED = ("CROSS_SIZE", "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")


@pytest.mark.parametrize(
    ("gpus", "visible", "devices", "message"),
    [
        ("0", None, "--num_gpus 2", "no GPU here"),
        ("1", None, "--num_gpus 1", "only ONE GPU"),
        ("2", None, "--num_gpus 2", "two GPUs"),
        ("8", None, "--num_gpus 2", "two of 8 GPUs"),
        ("3", "5,6,7", "--include localhost:5,6", "two of 3 GPUs"),
        ("1", "3", "--include localhost:3", "only ONE GPU"),
        ("0", "", "--num_gpus 2", "no GPU here"),
    ],
)
def test_ranks_run_on_the_visible_gpus_or_on_the_cpu(
    installed_clone: Path, gpus: str, visible: str | None, devices: str, message: str
) -> None:
    """The clone's torch reports TOY_GPUS GPUs, and its launcher prints its arguments."""
    changes = {"TOY_GPUS": gpus} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    call = run(installed_clone, "m7c.sh", "--restart", "3", "--set", "a b", **changes)
    assert call.returncode == 0, call.stderr
    assert message in call.stdout
    recipe = str(installed_clone / "recipes/m7c.py")
    launched = call.stdout.splitlines()[-1]
    port = re.findall(r"'--master_port', '(\d+)'", launched)[0]
    expected = [*devices.split(), "--master_port", port, recipe, "--set", "a b"]
    assert launched == f"launched with {expected}"
    watch = ["watch", "--restart", "3", "--", "deepspeed", *expected]
    assert call.stdout.splitlines()[-2] == f"called with {watch}"


def test_watch_sh_passes_arguments_to_nsa_watch_and_returns_its_code(installed_clone: Path) -> None:
    call = run(installed_clone, "watch.sh", "--restart", "2", "--", "sh", "-c", "echo a b; exit 3")
    assert call.returncode == 3, call.stderr
    assert call.stdout.splitlines() == [
        "called with ['watch', '--restart', '2', '--', 'sh', '-c', 'echo a b; exit 3']",
        "a b",
    ]


def write_recipe(folder: Path, code: str) -> None:
    """A recipe whose `say` writes a line at once, so that two ranks' lines cannot mix."""
    (folder / "recipes").mkdir()
    (folder / "recipes/m7c.py").write_text(
        "import os, sys, time\n"
        "def say(*words):\n"
        "    os.write(1, (' '.join(map(str, words)) + '\\n').encode())\n" + code
    )


FACTS = """\
import json
say('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[3:])
facts = {'cwd': os.getcwd(), 'python': sys.executable, 'environment': dict(os.environ)}
mine, other = (sys.argv[2] + str(rank) for rank in (0, 1))
if os.environ['RANK'] == '1':
    mine, other = other, mine
with open(mine + '.part', 'w') as file:
    json.dump(facts, file)
os.rename(mine + '.part', mine)
while not os.path.exists(other):
    time.sleep(0.01)
sys.exit(7 if os.environ['RANK'] == '1' else 0)
"""


def test_ranks_get_the_users_environment_and_return_a_failed_ones_code(real_packages: Path) -> None:
    folder = real_packages
    write_recipe(folder, FACTS)
    script = run(folder, "m7c.sh", str(folder / "rank"), "--set", "a b")
    assert script.returncode == 7
    for rank in (0, 1):
        assert f"rank {rank} of 2 ['--set', 'a b']" in script.stdout.splitlines()
        facts = json.loads((folder / f"rank{rank}").read_text())
        assert (facts["cwd"], Path(facts["python"]).parent) == ("/", Path(sys.prefix) / "bin")
        before, after = environment(folder), facts["environment"]
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        assert changed <= {*OF_BASH, *OF_DEEPSPEED, *SET_BY_LAUNCHER}


@pytest.mark.parametrize("script", ["m7c.sh", "m7c_pcie.sh"])
def test_help_comes_before_the_environment_is_built(tmp_path: Path, script: str) -> None:
    clone = make_clone(tmp_path)
    call = run(clone, script, "--restart", "2", "--help")
    assert call.returncode == 0, call.stderr
    assert "bash launch/m7c.sh [--restart N]" in call.stdout
    assert not (clone / ".venv").exists()


def test_help_shows_the_recipes_flags_once_there_is_an_environment(real_packages: Path) -> None:
    write_recipe(real_packages, "say('flags of the recipe', sys.argv[1:])\n")
    call = run(real_packages, "m7c.sh", "-h")
    assert call.stdout.splitlines()[-1] == "flags of the recipe ['--help']"


def test_a_signal_to_the_script_ends_every_rank(real_packages: Path) -> None:
    write_recipe(real_packages, "say('pid', os.getpid())\ntime.sleep(60)\n")
    process = start(real_packages, "m7c.sh")
    assert process.stdout
    pids: list[int] = []
    for line in process.stdout:
        pids += [int(line.split()[1])] if line.startswith("pid") else []
        if len(pids) == 2:
            break
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=45)
        assert process.returncode == 128 + signal.SIGTERM
        assert not any(map(alive, pids))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


NOTHING = "pcie: set  nothing"


@pytest.mark.parametrize(
    ("groups", "kernel", "variables", "disabled"),
    [
        (["0"], "intel_iommu=on quiet", {}, True),
        (["0"], "quiet", {"NCCL_P2P_LEVEL": "PHB"}, False),
        (["0"], "quiet", {"NCCL_P2P_DISABLE": "0"}, False),
        (["0"], "quiet iommu=pt", {}, False),
        ([], "quiet", {}, False),  # off
        (None, "quiet", {}, False),  # the kernel has none
    ],
)
def test_peer_access_is_disabled_where_it_may_hang_and_the_user_has_not_decided(
    groups: list[str] | None, kernel: str, variables: dict[str, str], disabled: bool, tmp_path: Path
) -> None:
    clone, folder = make_clone(tmp_path), tmp_path / "groups"
    for name in groups or ():
        (folder / name).mkdir(parents=True)
    if groups == []:
        folder.mkdir()
    (tmp_path / "cmdline").write_text(f"{kernel}\n")
    script = clone / "launch/m7c_pcie.sh"
    text = script.read_text().replace("/sys/kernel/iommu_groups", str(folder))
    script.write_text(text.replace("/proc/cmdline", str(tmp_path / "cmdline")))
    (clone / "launch/m7c.sh").write_text('env | grep NCCL_P2P; echo given "$@"\n')
    for arguments in (("--restart", "3", "--steps", "5"), ("--check",)):
        process = start(clone, "m7c_pcie.sh", *arguments, **variables)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert err.startswith("pcie: set  NCCL_P2P_DISABLE=1: the IOMMU" if disabled else NOTHING)
        if arguments == ("--check",):
            assert out == "", "it starts no run"
        else:
            assert ("NCCL_P2P_DISABLE=1" in out) == disabled
            assert out.endswith("given --restart 3 --steps 5\n")


def write_event(run: Path) -> None:
    if not (run / "tensorboard").exists():
        with SummaryWriter(str(run / "tensorboard")) as writer:
            writer.add_scalar("train/loss", 5.67, 1)


def test_it_serves_a_folders_runs_under_their_names(real_packages: Path, tmp_path: Path) -> None:
    script = real_packages / "launch/tensorboard.sh"
    script.write_text(script.read_text().replace("sleep 5\n", "sleep 0.5\n"))
    write_event(tmp_path / "runs/mine")
    port = free_port()
    process = start(real_packages, "tensorboard.sh", str(tmp_path / "runs"), "--port", str(port),
                    "--load_fast=false", "--reload_interval=1", TMPDIR=str(tmp_path))  # fmt: skip
    try:
        tags = {}
        deadline = time.monotonic() + 120
        while len(tags) < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            try:
                url = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
                with urllib.request.urlopen(url) as page:
                    tags = json.load(page)
            except OSError:
                continue
            if list(tags) == ["mine"]:  # a run that starts while the server runs
                write_event(tmp_path / "runs/sweep/other")
        assert sorted(tags) == ["mine", "sweep/other"], process.poll()
        assert list(tags["mine"]) == ["train/loss"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_missing_folder_is_reported_before_anything_starts(installed_clone: Path) -> None:
    call = run(installed_clone, "tensorboard.sh", "nowhere", "--port", "1")
    assert call.returncode == 2
    assert call.stderr == "tensorboard: nowhere: no such folder\n"
