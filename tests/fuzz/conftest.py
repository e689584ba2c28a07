"""Fixtures that draw examples: a seeded budget by default, fresh ones and many more with --full."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

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


@pytest.fixture
def fuzz_file(fuzz: Callable[..., None]) -> Callable[..., None]:
    """Write drawn contents to a file and use it: fuzz_file(path, 50, contents, use)."""

    def run(
        path: Path, examples: int, contents: st.SearchStrategy[bytes], use: Callable[[], Any]
    ) -> None:
        def check(content: bytes) -> None:
            path.write_bytes(content)
            use()

        fuzz(check, examples, content=contents)

    return run
