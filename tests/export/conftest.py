"""Folders of models: a Llama, and a Qwen3 that became sparse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nsa.export.to_hf import export
from tests.data.texts import texts, write_lines
from tests.engine.runs import TINY, on_one_rank, succeed
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
    """A Qwen3: imported, trained in both stages with a teacher, and exported."""
    folder = tmp_path_factory.mktemp("sparsified")
    torch.manual_seed(0)
    shape = SHAPE | {"tie_word_embeddings": False, "initializer_range": 0.05}
    Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=[1, 3])).save_pretrained(folder / "qwen3")
    (folder / "qwen3/README.md").write_text("---\nlicense: apache-2.0\n---\n")
    add_chat_tokenizer(folder / "qwen3")
    imported(folder / "qwen3", folder / "start", *SMALL)
    imported(folder / "qwen3", folder / "teacher", "--attention=dense")
    source = write_lines(folder / "lines.jsonl", texts(40))
    flags = ["--profile=demo", "--steps=4", "--set=train.selector_steps=2", "--run-dir=run"]
    flags += [f"--set=train.start_from={folder / 'start'}", f"--set=data.source={source}"]
    flags += [f"--set=train.teacher={folder / 'teacher'}", "--set=train.warmup_steps=1"]
    flags += [flag for flag in TINY if "model." not in flag]
    succeed(on_one_rank("sparsify.py", *flags, folder=folder))
    return export(folder / "run", folder / "hf")
