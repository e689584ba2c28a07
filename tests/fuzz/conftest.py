"""Fixture `fuzz`: a seeded budget of examples by default, fresh ones and many more with --full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

FULL = 200  # times the examples, with --full


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call a check with values drawn from strategies: fuzz(check, 50, text=texts())."""
    full = request.config.getoption("--full")

    def run(check: Callable[..., None], examples: int, **strategies: Any) -> None:
        budget = settings(
            max_examples=examples * (FULL if full else 1),
            derandomize=not full,
            deadline=None,  # a check has its own limit
            database=None,
            phases=tuple(Phase) if full else (Phase.generate,),  # shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        )
        budget(given(**strategies)(check))()

    return run
