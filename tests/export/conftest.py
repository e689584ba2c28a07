"""Folders of models: a Llama, and a Qwen3 that became sparse."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nsa.export.to_hf import export
from tests.export.llamas import SHAPE, SMALL, add_chat_tokenizer, command, imported, llama


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "llama"
    llama(folder)
    return folder


@pytest.fixture
def refused(refusal: Callable[..., str]) -> Callable[..., str]:
    """Import a folder, which must be refused; return the error. No file may be left."""

    def call(folder: Path, *arguments: str) -> str:
        error = refusal(*command(folder, folder.parent / "refused", *arguments))
        assert [path for path in folder.parent.iterdir() if "refused" in path.name] == []
        return error

    return call


@pytest.fixture(scope="session")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of an imported Qwen3."""
    folder = tmp_path_factory.mktemp("sparsified")
    torch.manual_seed(0)
    shape = SHAPE | {"tie_word_embeddings": False, "initializer_range": 0.05}
    Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=[1, 3])).save_pretrained(folder / "qwen3")
    add_chat_tokenizer(folder / "qwen3")
    imported(folder / "qwen3", folder / "run", *SMALL)
    return export(folder / "run", folder / "hf")
