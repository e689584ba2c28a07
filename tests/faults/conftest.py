"""The uninterrupted run, and the check that a run resumed after a fault repeats it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.engine.runs import losses
from tests.faults.harness import STEPS, Resumed, Run, fault_time, resume, start, weights
from tests.faults.table import Outcomes

CheckResumed = Callable[..., Resumed]


@dataclass
class Golden:
    """The uninterrupted run and its results."""

    run: Run
    losses: dict[int, float]
    weights: str  # hash
    seconds: float  # of all steps


@pytest.fixture(scope="session", autouse=True)
def short_grace(pytestconfig: pytest.Config) -> Iterator[None]:
    """Let peers of a lost rank wait for 1 second, not 5; --full measures the time to the end."""
    with pytest.MonkeyPatch.context() as patch:
        if not pytestconfig.getoption("--full"):
            patch.setenv("FAULT_GRACE", "1")
        yield


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    run = start(tmp_path_factory.mktemp("golden")).end()
    assert run.codes == [0, 0], run.output[-3_000:]
    by_step = losses(run.dir)
    assert sorted(by_step) == list(range(1, STEPS + 1))
    beats = [beat for beat in run.beats(0) if beat["event"] in ("step_start", "end")]
    return Golden(run, by_step, weights(run.dir), beats[-1]["mono"] - beats[0]["mono"])


@pytest.fixture(scope="session")
def outcomes() -> Iterator[Outcomes]:
    outcomes = Outcomes()
    yield outcomes
    outcomes.write()


@pytest.fixture
def check_resumed(golden: Golden, outcomes: Outcomes) -> CheckResumed:
    """Resume a run after a fault, compare it with the uninterrupted one, record the outcome."""

    def check(fault: str, variant: str, run: Run, failed: float | None = None) -> Resumed:
        last_step, failed = run.last_step, failed or fault_time(run)
        resumed = resume(run.folder)
        assert resumed.losses == golden.losses
        assert resumed.weights == golden.weights
        assert not list((run.dir / "checkpoints").glob(".*")), "a draft is left"
        outcomes.record(
            fault,
            variant,
            codes=run.codes,
            seconds=round(run.ended - failed, 1),
            lost=last_step - resumed.step,
            exact=True,
        )
        return resumed

    return check
