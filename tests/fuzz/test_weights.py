"""Checkpoints, exports and Llama models of others: damaged or forged, they are refused in one line.

By `nsa generate`, `nsa import` and `--resume`.
"""

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
from transformers import LlamaConfig, LlamaForCausalLM

from nsa.checkpoint.commit import MANIFEST, manifest_text, newest_valid, sync_and_hash
from nsa.checkpoint.state_file import read_state_file
from nsa.engine.resume import read_state
from nsa.export.to_hf import export
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
def test_a_pipe_in_a_checkpoint_does_not_block(name: str, checkpoint: Path) -> None:
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


CODE = (
    "import pathlib; pathlib.Path({!r}).touch()\nclass LlamaConfig: pass\nNSAConfig = LlamaConfig\n"
)
AUTO_MAP = {"AutoConfig": "configuration_evil.Evil", "AutoTokenizer": ["evil.Evil", None]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An export of this package, and a Llama saved by transformers."""
    root = tmp_path_factory.mktemp("exports")
    export(write_model(root / "run"), root / "nsa")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 259}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(root / "llama")
    return {"nsa": root / "nsa", "llama": root / "llama"}


@pytest.fixture
def folder(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the export, or of the folder that the parameter names, and code beside it."""
    kind = getattr(request, "param", "nsa")
    folder = Path(shutil.copytree(folders[kind], tmp_path / "hostile"))
    for name in ("configuration_evil.py", "evil.py"):
        (folder / name).write_text(CODE.format(str(tmp_path / "ran")))
    return folder


def import_it(folder: Path) -> int:
    to = folder.with_name("to")
    code = run("import", folder, "--to", to, "--tokenizer", "byte")
    assert to.exists() == (code == 0), "complete or not at all"
    shutil.rmtree(to, ignore_errors=True)
    assert not folder.with_name("ran").exists()
    return code


def generate_from(folder: Path) -> None:
    run("generate", folder, "--prompt=a", "--max-new-tokens=1", exact_stdout=True)
    assert not folder.with_name("ran").exists()


@pytest.mark.parametrize("folder", ["nsa", "llama"], indirect=True)
def test_any_config_json_is_imported_or_refused_in_one_line(
    fuzz_file: Callable[..., None], folder: Path
) -> None:
    file = folder / "config.json"
    tree = json.loads(file.read_text()) | {"auto_map": AUTO_MAP}
    file.write_text(json.dumps(tree))
    assert import_it(folder) == 0
    fuzz_file(file, 15, files(tree), partial(import_it, folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.yaml"])
def test_any_tokenizer_or_settings_file_loads_or_is_refused_in_one_line(
    fuzz_file: Callable[..., None], name: str, folder: Path
) -> None:
    intact = (folder / name).read_bytes()
    contents = damaged(intact)
    if name != "config.yaml":
        contents = files(json.loads(intact) | ({"auto_map": AUTO_MAP} if "config" in name else {}))
    fuzz_file(folder / name, 8, contents, partial(generate_from, folder))


def test_any_safetensors_load_or_are_refused_in_one_line(
    fuzz: Callable[..., None], folder: Path
) -> None:
    """The header of safetensors is JSON; an index may name other files."""
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    intact = file.read_bytes()
    length = int.from_bytes(intact[:8], "little")
    header = json.loads(intact[8 : 8 + length])
    names = {"weight_map": dict.fromkeys(header, "a.safetensors")}

    def repack(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + intact[8 + length :]

    def check(content: bytes, listing: bytes, is_indexed: bool) -> None:
        file.write_bytes(content)
        index.write_bytes(listing)
        if is_indexed:
            file.replace(folder / "a.safetensors")
        generate_from(folder)

    contents = files(header).map(repack) | damaged(intact)
    fuzz(check, 30, content=contents, listing=files(names), is_indexed=st.booleans())


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "tokenizer.json"])
def test_a_pipe_in_an_export_does_not_block(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    import_it(folder)
    generate_from(folder)
