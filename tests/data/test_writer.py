"""The process that tokenises: how it starts and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nsa.data.config import DataConfig
from nsa.data.source import DataError, HeldOut
from nsa.data.tokenizer import ByteTokenizer
from nsa.data.writer import Job, WorkerDied, Writer, lock, plan_of
from tests.data.odd_sources import Fails, Lists, Opened
from tests.data.processes import ends_soon, workers_of
from tests.ranks import wait_for


def writer_of(folder: Path, kind: type[Opened]) -> Writer:
    source = kind(DataConfig(source="books"), "books", HeldOut(0.1))
    locked = lock(folder)
    assert locked is not None
    return Writer(
        Job(source, ByteTokenizer(), folder, plan_of(source, ByteTokenizer()), {}), locked
    )


def error_of(writer: Writer) -> DataError:
    """The error with which a writer ends."""
    with closing(writer):
        try:
            wait_for(lambda: not writer.is_running())
        except DataError as error:
            return error
    raise AssertionError("it ended without an error")


def test_an_unexpected_error_is_a_crash_below_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = error_of(writer_of(tmp_path / "out", Fails))
    assert isinstance(error, WorkerDied)
    assert f"{tmp_path}/out: its worker ended with exit code 1, after the error above" in str(error)
    output = capfd.readouterr()
    assert "KeyError: 'no such key'" in output.err
    assert "a progress bar\nfrom C\n" in output.err
    assert not output.out


def test_it_starts_in_any_folder_and_without_slow_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if sys.version_info >= (3, 11):  # earlier versions always search the working directory first
        (tmp_path / "numpy.py").write_text("raise ImportError('wrong numpy')")
    monkeypatch.chdir(tmp_path)
    assert "holds no documents" in str(error_of(writer_of(tmp_path / "out", Lists)))
    modules = set(capfd.readouterr().err.split())
    assert "nsa.data.shards" in modules
    assert not modules & {"torch", "deepspeed", "transformers", "datasets", "pyarrow", "pandas"}


def test_a_closed_writer_leaves_no_process(tmp_path: Path) -> None:
    """Not even a zombie, of which a run that opens cache after cache would gather many."""
    writer = writer_of(tmp_path / "out", Lists)
    (pid,) = workers_of(os.getpid())
    writer.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_writer_that_waits_for_text_ends_with_its_parent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow.jsonl")
    flags = ["--source", str(tmp_path / "slow.jsonl"), "--tokenizer", "byte"]
    command = [sys.executable, "-m", "nsa", "data", "prepare", *flags, "--out", "out"]
    parent = subprocess.Popen(command, cwd=tmp_path)
    wait_for(lambda: workers_of(parent.pid) and (tmp_path / "out/index.json").exists())
    workers = workers_of(parent.pid)
    parent.kill()
    parent.wait()
    assert all(map(ends_soon, workers))
