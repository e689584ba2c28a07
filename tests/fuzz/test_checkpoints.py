"""Manifests, state.json and weights of others: `nsa generate` and `--resume` refuse in one line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file

from nsa.checkpoint.commit import MANIFEST, manifest_text, newest_valid, sync_and_hash
from nsa.checkpoint.state_file import read_state_file
from nsa.engine.resume import read_state
from tests.evaluate.models import write_model
from tests.fuzz.hostile import damaged, files, mutated, run, time_limit, to_json, values

STEP = "step00000003"
TRAINED = {"step": 3, "tokens": 9, "samples": 1, "data": "x", "skipped": 0, "passed_over": []}
STATE = {
    "state": TRAINED,
    "saved_under": {"layout": "0", "precision": "fp32", "ranks": 1},
    "tokenizer": {"name": "byte", "fingerprint": "x"},
}
MANIFEST_TREE = {
    **{"torch": "2.8", "deepspeed": "0.19", "saved_under": STATE["saved_under"]},
    **{"step": 3, "ranks": 1, "time": 1.5e9},
}
WEIGHTS = "mp_rank_00_model_states.pt"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The only checkpoint, of ZeRO stage 0, of a run that `nsa generate` loads."""
    model = write_model(tmp_path / "model", "train.precision=fp32")
    checkpoint = tmp_path / "run/checkpoints" / STEP
    checkpoint.mkdir(parents=True)
    for folder in (checkpoint, tmp_path / "run"):
        shutil.copyfile(model / "config.yaml", folder / "config.yaml")
    torch.save({"module": load_file(model / "model.safetensors")}, checkpoint / WEIGHTS)
    torch.save({}, checkpoint / "rng_rank0.pt")
    trained = {name: x for name, x in STATE.items() if name != "tokenizer"}
    (checkpoint / "state.json").write_bytes(to_json(trained))
    assert generate(checkpoint, rehash=True) == 0
    return checkpoint


def generate(checkpoint: Path, rehash: bool = False) -> int:
    """Generate from the checkpoint's run; `rehash` its files first, as an attacker does too."""
    if rehash:
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != MANIFEST)
        entries = {name: sync_and_hash(checkpoint / name) for name in names}
        (checkpoint / MANIFEST).write_text(manifest_text({**MANIFEST_TREE, "files": entries}))
    run_dir = checkpoint.parent.parent
    return run("generate", run_dir, "--prompt=a", "--max-new-tokens=1", exact_stdout=True)


def test_any_manifest_loads_or_is_refused_in_one_line(
    fuzz_file: Callable[..., None], checkpoint: Path
) -> None:
    tree = json.loads((checkpoint / MANIFEST).read_text())
    del tree["sha256"]

    def use() -> None:
        with time_limit():
            newest_valid(checkpoint.parent)
        generate(checkpoint)

    hashed = mutated(tree).map(lambda forged: manifest_text(forged).encode())
    fuzz_file(checkpoint / MANIFEST, 38, hashed | files(tree), use)


def test_any_state_json_loads_or_is_refused_in_one_line(
    fuzz_file: Callable[..., None], checkpoint: Path
) -> None:
    def use() -> None:
        generate(checkpoint, rehash=True)
        with time_limit(), contextlib.suppress(ValueError):
            read_state(read_state_file(checkpoint))

    fuzz_file(checkpoint / "state.json", 25, files(STATE), use)


def test_any_config_of_a_checkpoint_loads_or_is_refused_in_one_line(
    fuzz_file: Callable[..., None], checkpoint: Path
) -> None:
    tree = yaml.safe_load((checkpoint / "config.yaml").read_text())
    use = partial(generate, checkpoint, rehash=True)
    fuzz_file(checkpoint / "config.yaml", 13, files(tree), use)


def test_any_weights_load_or_are_refused_in_one_line(
    fuzz: Callable[..., None], checkpoint: Path
) -> None:
    """Of other shapes, types and kinds, and damaged."""
    file = checkpoint / WEIGHTS
    intact, good = file.read_bytes(), torch.load(file)
    tensors = st.sampled_from(
        (
            *(torch.zeros(()), torch.zeros(3, dtype=torch.int64), torch.zeros(2**10, 2**10)),
            torch.zeros(1).expand(10**6, 10**6),
            *(torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(2) * 1j),
        )
    )
    anything = values().filter(lambda value: value != -(10**400))
    trees = st.one_of(
        st.tuples(st.sampled_from(sorted(good["module"])), tensors | anything).map(
            lambda pair: {"module": {**good["module"], pair[0]: pair[1]}}
        ),
        anything,
        mutated({"module": {"embed.weight": 1}}),
    )

    def check(tree: Any, cut: bytes | None) -> None:
        if cut is None:
            torch.save(tree, file)
        else:
            file.write_bytes(cut)
        generate(checkpoint, rehash=True)

    fuzz(check, 30, tree=trees, cut=st.none() | st.none() | damaged(intact))


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "config.yaml", "rng_rank0.pt"])
def test_a_pipe_does_not_block(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    if name != MANIFEST:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        del manifest["sha256"]
        manifest["files"][name]["bytes"] = 0  # a pipe's size
        (checkpoint / MANIFEST).write_text(manifest_text(manifest))
    assert generate(checkpoint) == 2
    assert run("generate", checkpoint, "--prompt=a") == 2


def test_a_folder_that_contains_itself_ends(checkpoint: Path) -> None:
    checkpoints = checkpoint.parent
    run_dir = checkpoints.parent
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to(".")
    assert generate(checkpoint) == 2
    (run_dir / STEP).symlink_to(STEP)
    assert generate(checkpoint) == 2
    checkpoints.unlink()
    checkpoints.symlink_to("checkpoints")
    assert generate(checkpoint) == 2
