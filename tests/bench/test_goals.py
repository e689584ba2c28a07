"""Goals: verdicts at their bounds, and none without a measurement."""

from __future__ import annotations

from typing import Any

import pytest

from nsa.bench.goals import of_module, of_train

K = 1024


def row(length: int, kind: str = "module", shape: str = "64x4x128", **ratios: Any) -> dict:
    implementations = {name: {} for name in ratios}
    return {"kind": kind, "shape": shape, "length": length, "ratios": ratios,
            "implementations": implementations}  # fmt: skip


def times(forward_backward: float | None, peak_bytes: float | None = None) -> dict:
    return {"forward_backward": forward_backward, "peak_bytes": peak_bytes}


def verdict(goals: list[dict], what: str) -> tuple[float | None, bool | None]:
    (goal,) = [goal for goal in goals if what in goal["what"]]
    return goal["value"], goal["reached"]


def test_without_measurements_there_is_no_verdict() -> None:
    goals = of_module([]) + of_train([])
    assert len(goals) == 8
    assert all(goal["value"] is None and goal["reached"] is None for goal in goals)


@pytest.mark.parametrize(
    ("by_length", "even", "reached"),
    [
        ({4: 0.8, 6: 1.0, 8: 1.4}, 6, True),
        ({4: 1.1, 6: 1.2, 8: 1.4}, 4, True),
        ({4: 0.8, 6: 0.9, 8: 1.4}, 8, False),
        ({4: 1.2, 6: 1.1, 8: 0.9}, None, False),  # slower at the end: no break-even
    ],
)
def test_break_even_is_the_length_from_which_nsa_is_no_slower(
    by_length: dict[int, float], even: int | None, reached: bool
) -> None:
    rows = [row(k * K, **{"sdpa-flash": times(over)}) for k, over in by_length.items()]
    wanted = (None if even is None else even * K, reached)
    assert verdict(of_module(rows), "length from which") == wanted


def test_the_fastest_dense_attention_counts() -> None:
    one = row(64 * K, **{"sdpa-flash": times(9.0), "sdpa-cudnn": times(5.9),
                         "flex-causal": times(None), "flex-blocks": times(0.1)})  # fmt: skip
    assert verdict(of_module([one]), "best dense") == (5.9, False)


def test_memory_is_compared_with_flash() -> None:
    one = row(64 * K, **{"sdpa-flash": times(9.0, peak_bytes=0.5)})  # half of NSA's
    assert verdict(of_module([one]), "peak memory") == (2.0, False)


def test_fla_is_compared_at_the_lengths_of_the_goal() -> None:
    rows = [row(k * K, "same-pattern", fla=times(2.0)) for k in (4, 8, 64, 128)]
    cases = [goal for goal in of_module(rows) if "fla's" in goal["what"]]
    assert [goal["case"] for goal in cases] == ["64x4x128 T=8192 fla", "64x4x128 T=65536 fla"]
    assert all(goal["reached"] for goal in cases)


def test_training_goals_need_all_layers() -> None:
    def trained(layers: int, length: int, over: float, speed: float) -> dict:
        return {"layers": layers, "length": length, "batch": 1,
                "nsa_over_dense": {"tokens_per_s": over},
                "implementations": {"nsa": {"tokens_per_s": speed}}}  # fmt: skip

    goals = of_train([trained(12, 2 * K, 0.79, 250_000), trained(1, 2 * K, 9, 9e9),
                      trained(12, 32 * K, 1.5, 1.0)])  # fmt: skip
    assert verdict(goals, "over dense at 2k") == (0.79, False)
    assert verdict(goals, "from 8k on") == (1.5, True)
    assert verdict(goals, "on one H200") == (250_000, True)
