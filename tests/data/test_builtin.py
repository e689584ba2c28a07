"""Built-in sources: which documents they hold, and that these never change."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from nsa.data.builtin import embedded, python_files, synthetic
from nsa.data.config import DataConfig
from nsa.data.source import DataError, Source
from tests.data.texts import check_resumption, open_store
from tests.ranks import ROOT


def texts(source: Source) -> list[bytes]:
    return [document.text for document in source.read_all()]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"x = {name!r}\n")


def test_the_embedded_text_is_that_of_the_pinned_package() -> None:
    """Published figures were measured on it."""
    assert "\ndeepspeed==0.19.8\n" in (ROOT / "launch/constraints.txt").read_text()
    published = "41e964af0aa9ea1ca3f3999ac56c65fa4aa0b4cd9886c1702ebd51f3b4cbcba6"
    assert embedded().content == published


def test_files_are_sorted_by_path_without_what_an_installation_writes(tmp_path: Path) -> None:
    kept = ["abc.py", "runtime/a.py", "runtime/zero/b.py", "runtime_a.py", "zlib.py"]
    touch(tmp_path, *reversed(kept))
    (tmp_path / "runtime/__init__.py").write_text("")
    published = python_files(tmp_path, "py")
    touch(tmp_path, "git_version_info_installed.py", "runtime/__pycache__/a.pyc", "notes.txt")
    assert [document.location for document in python_files(tmp_path, "py").read_all()] == sorted(
        kept
    )
    assert texts(python_files(tmp_path, "py"))[0] == b"x = 'abc.py'\n"
    assert python_files(tmp_path, "py").content == published.content
    (tmp_path / "abc.py").write_text("y")
    assert python_files(tmp_path, "py").content != published.content


def test_an_installed_package_is_a_source_and_another_name_is_refused() -> None:
    tokens = open_store(DataConfig(source="embedded:tensorboard"), "train")
    assert len(tokens) > 100_000
    names = embedded("tensorboard").name, embedded().name
    assert names == ("embedded:tensorboard", "embedded"), "as in data.source"
    for missing in ("no_such_package", "../secrets", "tensorboard.summary"):
        expected = f"data.source = 'embedded:{missing}': '{missing}' is not an installed package; "
        with pytest.raises(DataError, match=re.escape(expected)):
            open_store(DataConfig(source=f"embedded:{missing}"), "train")


def test_the_synthetic_text_is_that_of_earlier_versions() -> None:
    digest = hashlib.sha256(b"\0".join(texts(synthetic())))
    assert digest.hexdigest()[:16] == "50e7db4fd4812e31"


def test_a_pass_resumes_after_any_document() -> None:
    assert check_resumption(synthetic(20_000)) == texts(synthetic(20_000))
