"""Manifests, state.json and weights of others: `nsa generate` and `--resume` refuse in one line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from nsa.checkpoint.commit import MANIFEST, manifest_text, newest_valid, sync_and_hash
from nsa.checkpoint.state_file import read_state_file
from nsa.data import DataConfig, loader
from nsa.data.dataset import open_dataset
from nsa.data.stream import stream_rows
from nsa.engine.process_group import Ranks
from nsa.engine.resume import read_state
from tests.data.texts import texts, write_lines
from tests.evaluate.models import write_model
from tests.fuzz.hostile import damaged, files, mutated, run, time_limit, to_json, values

STEP = "step00000003"
TRAINED = {"step": 3, "tokens": 9, "samples": 1, "data": "x", "skipped": 0, "passed_over": []}
STATE = {
    "state": TRAINED,
    "saved_under": {"layout": "0", "precision": "fp32", "ranks": 1},
    "tokenizer": {"name": "byte", "fingerprint": "x"},
}
ENTRY = {"bytes": 1, "sha256": "x"}
MANIFEST_TREE = {
    **{"torch": "2.8", "deepspeed": "0.19", "saved_under": STATE["saved_under"]},
    **{"step": 3, "ranks": 1, "time": 1.5e9, "finite": True},
    "files": dict.fromkeys(("state.json", "rng_rank0.pt", "config.yaml"), ENTRY),
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with one checkpoint of ZeRO stage 0 that `nsa generate` loads."""
    model = write_model(tmp_path / "model", "train.precision=fp32")
    checkpoint = tmp_path / "run/checkpoints" / STEP
    checkpoint.mkdir(parents=True)
    shutil.copyfile(model / "config.yaml", checkpoint / "config.yaml")
    shutil.copyfile(model / "config.yaml", tmp_path / "run/config.yaml")
    from safetensors.torch import load_file

    weights = {"module": load_file(model / "model.safetensors")}
    torch.save(weights, checkpoint / "mp_rank_00_model_states.pt")
    torch.save({}, checkpoint / "rng_rank0.pt")
    state = json.loads(json.dumps(STATE))
    del state["tokenizer"]
    (checkpoint / "state.json").write_bytes(to_json(state))
    write_manifest(checkpoint)
    assert generate(tmp_path / "run") == 0
    return tmp_path / "run"


def write_manifest(checkpoint: Path) -> None:
    """What an attacker does too: hash what is there."""
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != MANIFEST)
    entries = {name: sync_and_hash(checkpoint / name) for name in names}
    (checkpoint / MANIFEST).write_text(manifest_text({**MANIFEST_TREE, "files": entries}))


def generate(path: Path) -> int:
    return run("generate", path, "--prompt=a", "--max-new-tokens=1", exact_stdout=True)


def test_any_manifest_loads_or_is_refused_in_one_line(
    fuzz: Callable[..., None], run_dir: Path
) -> None:
    checkpoint = run_dir / "checkpoints" / STEP
    tree = json.loads((checkpoint / MANIFEST).read_text())

    def check(content: bytes, rehash: bool) -> None:
        if rehash:
            try:
                forged = json.loads(content)
                forged.pop("sha256", None)
                content = manifest_text(forged).encode()
            except (ValueError, AttributeError, RecursionError):
                pass
        (checkpoint / MANIFEST).write_bytes(content)
        with time_limit():
            newest_valid(checkpoint.parent)
        generate(run_dir)

    fuzz(check, 38, content=files(tree), rehash=st.booleans())


def test_any_state_json_loads_or_is_refused_in_one_line(
    fuzz: Callable[..., None], run_dir: Path
) -> None:
    checkpoint = run_dir / "checkpoints" / STEP

    def check(content: bytes) -> None:
        (checkpoint / "state.json").write_bytes(content)
        write_manifest(checkpoint)
        generate(run_dir)
        with time_limit(), contextlib.suppress(ValueError):
            read_state(read_state_file(checkpoint), Ranks(rank=0, world_size=1, local_rank=0))

    fuzz(check, 25, content=files(STATE))


def test_any_rank_state_that_is_accepted_can_be_restored(
    fuzz: Callable[..., None], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is accepted can be restored: a stream from its cursors."""
    checkpoint, ranks = run_dir / "checkpoints" / STEP, Ranks(0, 0, 1)
    source = write_lines(tmp_path / "a.jsonl", texts(200))
    config = DataConfig(source=source, seq_len=16, held_out=0.1)
    monkeypatch.setattr(loader, "Worker", lambda work, name: work)
    shape: dict[str, int] = {"rank": 0, "world_size": 1, "micro_batch": 2, "seed": 3}
    dataset = open_dataset(config)
    _, cursor, _ = next(stream_rows(dataset, seed=3, part=0, parts=1, rows=2))
    under = loader.StreamingBatches(dataset, state=None, **shape)._settings
    feed = {"under": under, "workers": [cursor]}
    state = {"feed": feed}
    outcomes = set()

    def check(content: bytes) -> None:
        (checkpoint / "rank0.json").write_bytes(content)
        with time_limit(), contextlib.suppress(ValueError):
            outcomes.add("read")
            _, saved = read_state(read_state_file(checkpoint), ranks)
            feed = saved.get("feed")
            next(loader.StreamingBatches(dataset, state=feed, **shape)._worker())
            outcomes.add("restored")

    check(to_json(state))
    assert outcomes == {"read", "restored"}
    fuzz(check, 38, content=files(state))
    fuzz(check, 38, content=mutated(feed).map(lambda feed: to_json(state | {"feed": feed})))


def test_any_config_of_a_checkpoint_loads_or_is_refused_in_one_line(
    fuzz: Callable[..., None], run_dir: Path
) -> None:
    checkpoint = run_dir / "checkpoints" / STEP
    import yaml

    tree = yaml.safe_load((checkpoint / "config.yaml").read_text())

    def check(content: bytes) -> None:
        (checkpoint / "config.yaml").write_bytes(content)
        write_manifest(checkpoint)
        generate(run_dir)

    fuzz(check, 13, content=files(tree))


def test_any_weights_load_or_are_refused_in_one_line(
    fuzz: Callable[..., None], run_dir: Path
) -> None:
    """Of other shapes, types and kinds, and damaged."""
    checkpoint = run_dir / "checkpoints" / STEP
    file = checkpoint / "mp_rank_00_model_states.pt"
    intact, good = file.read_bytes(), torch.load(file)
    others = st.sampled_from(
        (
            *(torch.zeros(()), torch.zeros(3, dtype=torch.int64), torch.zeros(2**10, 2**10)),
            torch.zeros(1).expand(10**6, 10**6),
            *(torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(2) * 1j),
        )
    )
    names = st.sampled_from(sorted(good["module"]))
    anything = values().filter(lambda value: value != -(10**400))

    def check(name: str, value: Any, whole: Any, cut: bytes, kind: int) -> None:
        if kind == 0:
            torch.save({"module": {**good["module"], name: value}}, file)
        elif kind == 1:
            torch.save(whole, file)
        else:
            file.write_bytes(cut)
        write_manifest(checkpoint)
        generate(run_dir)

    fuzz(
        check,
        30,
        name=names,
        value=others | anything,
        whole=anything | mutated({"module": {"embed.weight": 1}}),
        cut=damaged(intact),
        kind=st.integers(0, 2),
    )


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "config.yaml", "rng_rank0.pt"])
def test_a_pipe_does_not_block(name: str, run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints" / STEP
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    manifest = json.loads((checkpoint / MANIFEST).read_text()) if name != MANIFEST else None
    if manifest is not None:
        del manifest["sha256"]
        manifest["files"][name]["bytes"] = 0  # a pipe's size
        (checkpoint / MANIFEST).write_text(manifest_text(manifest))
    assert generate(run_dir) == 2
    assert generate(checkpoint) == 2


def test_a_folder_that_contains_itself_ends(run_dir: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to(".")
    assert generate(run_dir) == 2
    (run_dir / STEP).symlink_to(STEP)
    assert generate(run_dir) == 2
    checkpoints.unlink()
    checkpoints.symlink_to("checkpoints")
    assert generate(run_dir) == 2


def test_a_million_ranks_are_refused_at_once(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints" / STEP
    for ranks in (10**15, float("inf"), -1, 0):
        forged = {**MANIFEST_TREE, "ranks": ranks}
        (checkpoint / MANIFEST).write_text(manifest_text(forged))
        assert generate(run_dir) == 2
