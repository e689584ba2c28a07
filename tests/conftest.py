"""Shared by all tests: the `full` and `gpu` markers and a fixed number of threads."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.bounds import checked_bounds

if not torch.cuda.is_available():
    # Run kernels on the CPU, in Triton's interpreter. Triton reads this when it is first imported,
    # which DeepSpeed does.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts the suite in the background makes it ignore the signals that tests send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Collecting 5,000 tests makes no garbage; see pytest_collection_finish.
gc.disable()

# One thread on any machine, also in started programs: sums split alike everywhere, and threads that
# wait for each other while all cores are busy take four times the CPU time.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


# Directories whose tests start whole runs; some take half a minute.
SLOW = ("faults", "launch", "bench", "docs", "engine", "watchdog")
QUICK = ("doctor", "gates", "monitor")  # whose files take a second or two


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Name the fork server of this process to a worker of pytest-xdist."""
    node.workerinput["fork_server"] = ranks.server_address()


def pytest_configure(config: pytest.Config) -> None:
    workerinput = getattr(config, "workerinput", {})
    ranks.shared_server = workerinput.get("fork_server")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `full` tests without --full and `gpu` tests without a CUDA device; run slow ones first.

    And quick ones last: no worker of pytest-xdist runs a slow file while the others have no work.
    """
    folders = {item: item.path.parent.name for item in items}
    items.sort(key=lambda item: (folders[item] in QUICK) - (folders[item] in SLOW))
    reasons = {}
    if not config.getoption("--full"):
        reasons["full"] = "part of the full matrix: run with --full"
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device: torch.cuda.is_available() is False"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but skip the imported modules and tests: a million objects."""
    gc.freeze()
    gc.set_threshold(50_000)  # interpreted kernels make and drop many objects
    gc.enable()


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call `nsa`, which must end with exit code 2 and one line on stderr; return the line."""

    def call(*arguments: object) -> str:
        from nsa.cli import main

        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("nsa: ")
        assert error.count("\n") == 1, error
        return error

    return call


@pytest.fixture(scope="session")
def counted_once() -> Iterator[None]:
    """Plans of all cards and flags count the same few models, which takes half a second each."""
    from nsa.planner import activations

    counted: dict[str, Any] = {}
    count_layers = activations.count_layers

    def count(*arguments: Any) -> Any:
        key = repr(arguments)
        if key not in counted:
            counted[key] = count_layers(*arguments)
        return counted[key]

    with mock.patch.object(activations, "count_layers", count):
        yield


@pytest.fixture(autouse=True, scope="session")
def bounds() -> Iterator[None]:
    """Let each interpreted kernel fail that accesses memory outside of its tensors."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    with checked_bounds():
        yield
