"""Kernel check on all ranks: what fails on one falls back on all, and is refused by name."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import launch


def test_a_kernel_that_is_wrong_on_one_rank_falls_back_on_both() -> None:
    program = Path(__file__).with_name("kernel_check_ranks.py")
    first, second = launch(program, timeout=240)
    assert first == second
    refused, check, backends = first.splitlines()
    problem = "swiglu: kernel check on rank 1: its error is 0.045"
    assert refused.startswith(f"refused: model.attention.backend = 'triton': {problem}")
    assert "set it to auto" in refused
    assert check.startswith(f"warn: {problem}")
    assert backends == "backends: blockwise triton"
