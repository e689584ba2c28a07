"""`launch/gpu.sh` runs everything that needs a GPU; a failing stage does not stop the others."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from functools import partial
from pathlib import Path

import pytest

from tests.bench.__main__ import parser
from tests.launch.clone import capture, write_script, write_wheel
from tests.ranks import ROOT

RUNS = {
    "A": ["card", "train", "profile", "module", "decode", "tiles"],
    "B": ["doctor", "bits", "peers", "recipe-zero1", "ncu", "real"],
}
NAMED = [
    *("aot", "aot-tiles", "tests", "tests-bench", "sanitizer", "kernels", "flex"),
    *("step-nsa", "step-nsa-reentrant", "step-dense", "step-dense-reentrant", "recipe-zero2"),
]


gpu_sh = partial(capture, "bash", ROOT / "launch/gpu.sh")


def stand_in(folder: Path, script: str) -> str:
    """A Python that runs these lines of bash."""
    return str(write_script(folder / "python", f"#!/usr/bin/env bash\n{script}"))


def commands(*arguments: str) -> list[list[str]]:
    done = gpu_sh("--dry-run", *arguments, PYTHON="python")
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("flags", [[], ["--rehearse"]], ids=str)
def test_stages_run_benchmarks_and_flags_that_exist(tmp_path: Path, flags: list[str]) -> None:
    named = [word for name in NAMED for word in ("--stage", name)]
    out = str(tmp_path / "x")
    runs, alone = commands(*flags, "--out", out), commands(*flags, "--out", out, *named)
    assert len(runs) == len(RUNS["A"]) + len(RUNS["B"])
    assert len(alone) == len(NAMED)
    for words in (*runs, *alone):
        if words[2] == "tests.bench":
            parser(words[3:]).parse_args(words[3:])
    steps = [words for words in alone if words[3] == "train" and "--kinds" in words]
    assert {(words[words.index("--kinds") + 1], "reentrant" in words) for words in steps} == {
        (kind, recompute) for kind in ("nsa", "dense") for recompute in (False, True)
    }
    assert not Path(out).exists()


def test_a_run_takes_at_most_330_seconds_and_its_last_stage_what_is_left(tmp_path: Path) -> None:
    """Here the others take no time."""
    python = stand_in(tmp_path, 'case "$*" in *chip_of*) echo sm_90 ;; esac\n')
    done = gpu_sh("--run", "A", "--out", tmp_path / "out", PYTHON=python)
    assert done.returncode == 0, done.stderr
    limits = [int(x) for x in re.findall(r"^gpu: [\w-]+, (\d+) s at most", done.stdout, re.M)]
    script = (ROOT / "launch/gpu.sh").read_text()
    assert "\nrun_seconds=330\n" in script
    assert limits[:-1] == [10, 80, 130, 60, 10]
    assert 300 < limits[-1] <= 330
    others = [int(x) for x in re.findall(r"^ +(?:stage|bench) B [\w-]+ (\d+) ", script, re.M)]
    assert sum(others) < 330
    assert list(tmp_path.glob("out/*")) == [tmp_path / "out/run-A.tar.gz"]


COLLECT_WITHOUT_TRAINING_PACKAGES = """
import sys
for name in ("deepspeed", "datasets", "transformers", "tensorboard", "flash_attn", "matplotlib",
             "yaml", "psutil", "zstandard", "aiohttp", "tqdm", "safetensors", "tokenizers"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["--collect-only", *sys.argv[1:]]))
"""


def test_its_tests_are_all_gpu_tests_and_import_without_training_packages() -> None:
    stages = [word for name in ("tests", "tests-bench", "sanitizer") for word in ("--stage", name)]
    ops, bench, sanitizer = (words[3:] for words in commands(*stages))
    words = [*ops, *bench]
    marked = {
        path
        for package in ("ops", "model", "bench")
        for path in (ROOT / "tests" / package).rglob("test_*.py")
        if "mark.gpu" in path.read_text()
    }
    roots = [ROOT / word for word in words if word.startswith("tests/")]
    assert all(any(path.is_relative_to(root) for root in roots) for path in marked)
    done = capture(sys.executable, "-c", COLLECT_WITHOUT_TRAINING_PACKAGES, *words, folder=ROOT)
    assert done.returncode == 0, done.stdout
    assert "test_twenty_runs_at_real_sizes_give_the_same_bits[M7C-torch.bfloat16]" in done.stdout
    assert "compute_sanitizer" not in done.stdout
    assert sanitizer[-1].partition("::")[2] in (ROOT / sanitizer[-1].partition("::")[0]).read_text()


def test_a_missing_package_is_reported_before_anything_runs(tmp_path: Path) -> None:
    bare = stand_in(tmp_path, f'exec {sys.executable} -S "$@"\n')
    for path, message in (
        (bare, "lacks torch: install it"),
        (str(tmp_path / "none"), "not found; set PYTHON to a Python interpreter"),
    ):
        done = gpu_sh("--rehearse", "--out", tmp_path / "out", PYTHON=path)
        assert done.returncode == 2
        assert f"{path} {message}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_gpu_between_two_chips_compiles_for_the_older_one(tmp_path: Path) -> None:
    python = stand_in(
        tmp_path,
        'case "$*" in\n*tests.bench*) echo "$@" ;;\n'
        f'*chip_of*) exec {sys.executable} -c "import torch\n'
        'torch.cuda.get_device_capability = lambda *_: (8, 7)\n$2" ;;\nesac\n',
    )
    done = gpu_sh("--stage", "aot", "--out", tmp_path / "out", PYTHON=python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests.bench aot --benchmarks --arch sm_86 " in done.stdout


RESULTS = r"""
[ "$2" = -c ] || [ "$1" = -c ] && exit 0
while [ $# -gt 0 ]; do
    case $1 in
    --out) echo "{}" > "$2" ;;
    --run-dir)
        mkdir -p "$2/checkpoints" "$2/tensorboard"
        touch "$2/tensorboard/x"
        echo step00000004 > "$2/checkpoints/latest"
        [ -e "$2/killed.csv" ] && loss=3 || loss=4
        printf 'step,tokens,loss\n4,64,5\n5,80,%s\n' "$loss" > "$2/metrics.csv"
        echo '{"pid": 999999999}' > "$2/heartbeat_rank0.jsonl"
        ;;
    esac
    shift
done
"""


def test_a_run_leaves_one_archive_of_its_results(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = gpu_sh("--rehearse", "--run", "B", "--out", out, PYTHON=stand_in(tmp_path, RESULTS))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.iterdir()] == ["run-B.tar.gz"]
    with tarfile.open(out / "run-B.tar.gz") as archive:
        archive.extractall(tmp_path / "results", filter="data")
    results = tmp_path / "results"
    names = {str(path.relative_to(results)) for path in results.rglob("*")}
    assert {"peers.json", "real.json"} <= names
    assert "runs/zero1/tensorboard/x" in names
    assert not any("checkpoints" in name for name in names)
    text = "1 steps ran twice; their losses differ by at most 1\n"
    assert text in (results / "gpu.log").read_text(), "of ZeRO-1, whose rank is killed after step 5"
    lines = (results / "summary.txt").read_text().splitlines()
    assert [line.split()[1] for line in lines] == RUNS["B"]
    assert all(line.endswith("done, 0 kernels compiled") for line in lines)


def test_wheels_peers_and_nsa_are_importable_in_stages_and_not_installed(tmp_path: Path) -> None:
    wheels, peers = tmp_path / "wheels", tmp_path / "peers"
    wheels.mkdir()
    peers.mkdir()
    (peers / "a_peer.py").touch()
    write_wheel(wheels, "carried", "1.0", {"carried.py": ""})
    python = stand_in(
        tmp_path,
        f'case "$*" in *tests.bench*) cd / && exec {sys.executable} -S -c '
        '"import carried, a_peer, importlib.util as u; '
        "print(carried.__file__, a_peer.__file__, u.find_spec('nsa').origin)\" ;; "
        f'*) exec {sys.executable} "$@" ;; esac\n',
    )
    done = gpu_sh("--rehearse", "--stage", "train", "--out", tmp_path / "out",
                  "--wheels", wheels, "--peers", peers, PYTHON=python)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "carried.py" in line)
    assert str(peers) in line
    assert str(ROOT / "nsa" / "__init__.py") in line
    assert not Path(line.split()[0]).exists()  # removed with the call
    refused = gpu_sh("--stage", "train", "--wheels", tmp_path / "none")
    assert refused.returncode == 2
    assert "no such folder" in refused.stderr


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS)
def test_a_run_runs_at_tiny_sizes_on_a_cpu(tmp_path: Path, run: str) -> None:
    """In a Python that has the packages but not `nsa`, as on a machine that only got a clone."""
    venv.create(tmp_path / "venv", symlinks=True)
    (bare,) = tmp_path.glob("venv/lib/python3*/site-packages")
    (bare / "packages.pth").write_text(sysconfig.get_path("purelib"))  # not its own .pth files
    done = gpu_sh("--rehearse", "--run", run, "--out", tmp_path, timeout=1_800,
                  PYTHON=str(tmp_path / "venv/bin/python"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / f"run-{run}.tar.gz") as archive:
        archive.extractall(tmp_path / "results", filter="data")
    for file in tmp_path.glob("results/*.json"):
        results = json.loads(file.read_text())
        assert results.get("finished", True), file
        for row in results.get("rows", []):
            for name, figures in row.get("implementations", {}).items():
                if name.startswith(("nsa", "index", "dense")):  # others may lack a package or a GPU
                    assert not figures["errors"], (file, figures["errors"])
    if run == "B":
        text = r"\n[1-9]\d* steps ran twice; their losses differ by at most 0\n"
        assert re.search(text, (tmp_path / "results/gpu.log").read_text())


def test_a_stage_that_hangs_or_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """Not even if it leaves a process behind that holds its output open."""
    python = stand_in(
        tmp_path,
        'case "$*" in\n'
        "*bench\\ decode*) setsid sleep 25 & sleep 60 ;;\n"
        "*kinds\\ parts*) exit 3 ;;\n"
        "*) echo reached ;;\n"
        "esac\n",
    )
    start = time.monotonic()
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            ["bash", ROOT / "launch/gpu.sh", "--rehearse", "--limit", "1", "--out", tmp_path / "o",
             "--stage", "decode", "--stage", "kernels", "--stage", "train"],
            stdout=log, env={**os.environ, "PYTHON": python},
        )  # fmt: skip
    assert time.monotonic() - start < 20
    assert done.returncode == 1
    lines = (tmp_path / "log").read_text().splitlines()
    decode, kernels, last = lines[-3:]
    assert lines[-4] == "reached"
    assert "ENDED by its limit" in decode
    assert "FAILED with exit code 3" in kernels
    assert last.startswith("gpu: train")
    assert "done" in last
