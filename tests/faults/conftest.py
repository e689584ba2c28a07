"""The run that nothing interrupts, which all others have to repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.engine.runs import losses
from tests.faults.harness import STEPS, Resumed, Run, resume, start, weights
from tests.faults.outcomes import Outcomes


@dataclass
class Golden:
    """What a run comes to that nothing interrupts."""

    losses: dict[int, float]
    weights: str
    seconds: float  # from its first step to its last


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Made once, on the ranks that the others run on as well."""
    run = start(tmp_path_factory.mktemp("golden")).end()
    assert run.codes == [0, 0], run.said[-3_000:]
    found = losses(run.dir)
    assert sorted(found) == list(range(1, STEPS + 1))
    beats = [beat for beat in run.beats(0) if beat["event"] in ("step_start", "end")]
    return Golden(found, weights(run.dir), beats[-1]["mono"] - beats[0]["mono"])


@pytest.fixture(scope="session")
def outcomes() -> Iterator[Outcomes]:
    """Kept for the page that tells of them."""
    outcomes = Outcomes()
    yield outcomes
    outcomes.write()


class Aftermath:
    """Lets a run go on that has suffered, and holds it to the one that nothing interrupted."""

    def __init__(self, golden: Golden, outcomes: Outcomes) -> None:
        self._golden, self._outcomes = golden, outcomes

    def __call__(self, fault: str, variant: str, run: Run, since: float, until: float) -> Resumed:
        """`since` and `until` are when the fault happened, and when all ranks had ended."""
        done = run.last_step
        resumed = resume(run.folder)
        assert resumed.losses == self._golden.losses
        assert resumed.weights == self._golden.weights
        self._outcomes.tell(
            fault,
            variant,
            codes=run.codes,
            seconds=round(until - since, 1),
            lost=done - resumed.step,
            exact=True,
        )
        return resumed


@pytest.fixture
def aftermath(golden: Golden, outcomes: Outcomes) -> Aftermath:
    """Judges a run that has suffered."""
    return Aftermath(golden, outcomes)
