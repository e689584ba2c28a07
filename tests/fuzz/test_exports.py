"""Exports and Llama checkpoints of others: `nsa import` and `nsa generate` refuse in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from nsa.export.to_hf import export
from tests.evaluate.models import write_model
from tests.fuzz.hostile import damaged, files, run

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


def generate(folder: Path) -> None:
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
    fuzz_file(folder / name, 8, contents, partial(generate, folder))


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
        generate(folder)

    contents = files(header).map(repack) | damaged(intact)
    fuzz(check, 30, content=contents, listing=files(names), is_indexed=st.booleans())


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "tokenizer.json"])
def test_a_pipe_does_not_block(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    import_it(folder)
    generate(folder)
