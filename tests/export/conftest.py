"""Fixtures of the imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.llamas import llama


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "llama"
    llama(folder)
    return folder
