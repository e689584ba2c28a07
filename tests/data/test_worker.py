"""Workers: what passes through the pipes, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from nsa.data.source import DataError
from nsa.data.worker import Worker
from tests.data import works
from tests.data.processes import gone, workers_of


def test_what_a_worker_makes_comes_whole_however_much_libraries_print(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(Worker(partial(works.chatter, 5), "books")) as worker:
        for number in range(5):
            made = next(worker)
            assert made.shape == (50_000,)
            assert (made == number).all()
    said = capfd.readouterr()
    assert "a progress bar 4" in said.err
    assert not said.out


def test_a_worker_that_dies_is_named_with_its_signal_and_last_words() -> None:
    with closing(Worker(works.die, "data.source = 'books', rank 3")) as worker:
        assert next(worker) == 1
        with pytest.raises(DataError, match=r"'books', rank 3: .*SIGABRT.*the disk is on fire"):
            next(worker)


def test_a_worker_that_is_killed_is_named_with_what_may_have_killed_it() -> None:
    with closing(Worker(partial(works.read_slowly, 60.0, 1), "books")) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"signal 9 \(SIGKILL\).*memory.*data\.workers"):
            next(worker)


def test_an_error_that_nobody_foresaw_comes_with_its_kind_and_its_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(Worker(works.fail, "books")) as worker:
        assert next(worker) == 1
        with pytest.raises(DataError, match=r"KeyError: 'no such thing'"):
            next(worker)
    assert "Traceback" in capfd.readouterr().err


def test_a_worker_says_where_it_stands_before_anything_is_made() -> None:
    with closing(Worker(partial(works.read_slowly, 0.4, 4), "books")) as worker:
        begun = worker.heard
        assert next(worker) == "found"
        assert worker.source == "books"
        assert worker.place.startswith("books.jsonl:")
        assert worker.heard > begun


def test_a_worker_starts_without_what_only_training_needs() -> None:
    with closing(Worker(works.list_modules, "books")) as worker:
        heavy = {"torch", "deepspeed", "transformers", "datasets", "pyarrow", "pandas"}
        assert not heavy & set(next(worker))


def test_a_worker_finds_the_package_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info >= (3, 11):  # before that, Python always looks into the folder first
        (tmp_path / "numpy.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    with closing(Worker(partial(works.chatter, 1), "books")) as worker:
        assert len(next(worker)) == 50_000


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["its pipe is full", "its source is slow"])
def test_a_worker_ends_with_the_process_that_started_it(seconds: float) -> None:
    program = (
        "import time\nfrom functools import partial\n"
        "from nsa.data.worker import Worker\nfrom tests.data import works\n"
        f"slow = {seconds}\n"
        "work = partial(works.read_slowly, slow, 2) if slow else partial(works.chatter, 10**6)\n"
        "worker = Worker(work, 'books')\nprint('started', flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    time.sleep(1.0)  # into its work
    (worker,) = workers_of(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(worker)
