"""Data worker processes: what passes through the pipes, and how they end."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from nsa.data.source import DataError
from nsa.data.worker import Worker, WorkerDied
from tests.data import worker_tasks
from tests.data.processes import ends_soon, workers_of


def test_items_arrive_intact_whatever_libraries_print(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(Worker(partial(worker_tasks.print_and_yield, 5), "books")) as worker:
        for number in range(5):
            item = next(worker)
            assert item.shape == (50_000,)
            assert (item == number).all()
        with pytest.raises(StopIteration):
            next(worker)
    output = capfd.readouterr()
    assert "a progress bar 4" in output.err
    assert not output.out


def test_the_error_of_a_crash_names_the_worker_its_signal_and_its_last_output() -> None:
    with closing(Worker(worker_tasks.abort, "data.source = 'books', rank 3")) as worker:
        assert next(worker) == 1
        with pytest.raises(DataError, match=r"'books', rank 3: .*SIGABRT.*the disk is on fire"):
            next(worker)


def test_an_unexpected_exception_is_a_crash_that_names_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(Worker(worker_tasks.fail, "books")) as worker:
        assert next(worker) == 1
        with pytest.raises(
            WorkerDied, match=r"exit code 1; last output: .*KeyError: 'no such key'$"
        ):
            next(worker)
    assert "Traceback" in capfd.readouterr().err


def test_a_worker_starts_without_slow_imports() -> None:
    with closing(Worker(worker_tasks.list_modules, "books")) as worker:
        heavy = {"torch", "deepspeed", "transformers", "datasets", "pyarrow", "pandas"}
        assert not heavy & set(next(worker))


def test_a_worker_imports_the_package_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info >= (3, 11):  # earlier versions always search the working directory first
        (tmp_path / "numpy.py").write_text("raise ImportError('wrong numpy')")
    monkeypatch.chdir(tmp_path)
    with closing(Worker(partial(worker_tasks.print_and_yield, 1), "books")) as worker:
        assert len(next(worker)) == 50_000


def test_a_closed_worker_leaves_no_process() -> None:
    """Not even a zombie, of which a run that opens worker after worker would gather many."""
    worker = Worker(partial(worker_tasks.read_slowly, 60.0, 1), "books")
    worker.close()
    assert not Path(f"/proc/{worker.pid}").exists()


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["full pipe", "slow source"])
def test_a_worker_ends_with_its_parent(seconds: float) -> None:
    program = (
        "import time\nfrom functools import partial\n"
        "from nsa.data.worker import Worker\nfrom tests.data import worker_tasks\n"
        f"slow = {seconds}\n"
        "full = partial(worker_tasks.print_and_yield, 10**6)\n"
        "work = partial(worker_tasks.read_slowly, slow, 2) if slow else full\n"
        "worker = Worker(work, 'books')\nprint('started', flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    time.sleep(1.0)  # so that it is at work
    (worker,) = workers_of(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ends_soon(worker)
