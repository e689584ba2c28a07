"""What the kernels are to reach, held against the figures of one run on a GPU.

Each goal is a ratio inside one case. A goal that the run did not measure stays in the list, with
neither a value nor a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nsa.bench.dense import DENSE
from nsa.bench.report import ratio

Row = dict[str, Any]
K = 1024
BIG = "64x4x128"
FLA_LENGTHS = (8 * K, 16 * K, 32 * K, 64 * K)
BREAK_EVEN = 6 * K


def of_module(rows: Sequence[Row]) -> list[Row]:
    """The goals that `python -m nsa.bench module` measures."""
    module = [row for row in rows if row["kind"] == "module"]
    same = [row for row in rows if row["kind"] == "same-pattern"]
    parts = [row for row in rows if row["kind"] == "parts"]
    times_fla = [
        (_case(row, name), row["ratios"].get(name, {}).get("forward_backward"))
        for row in same
        if row["length"] in FLA_LENGTHS
        for name in ("fla", "fla-with-window")
        if name in row["contenders"]
    ]
    big = [row for row in module if row["shape"] == BIG]
    return [
        *_judge("fla's time over NSA's, same pattern, 8k to 64k, fwd+bwd", ">=", 2, times_fla),
        *_judge("length from which NSA is no slower than dense", "<=", BREAK_EVEN, _even(big)),
        *_judge(
            "best dense time over NSA's at 64k, fwd+bwd",
            ">=",
            6,
            ((_case(row), best_dense(row)) for row in big if row["length"] == 64 * K),
        ),
        *_judge(
            "NSA's peak memory over dense flash's at 64k",
            "<=",
            1.3,
            ((_case(row), _peak(row)) for row in module if row["length"] == 64 * K),
        ),
        *_judge(
            "share of importance and top-n in the forward at 64k",
            "<=",
            0.35,
            (
                (_case(row), row["forward_share"]["select_blocks"])
                for row in parts
                if row["length"] == 64 * K
            ),
        ),
    ]


def of_train(rows: Sequence[Row]) -> list[Row]:
    """The goals that `python -m nsa.bench train` measures."""
    whole = [row for row in rows if row["layers"] == 12]

    def speed(row: Row) -> tuple[str, float | None]:
        return f"T={row['length']} batch {row['batch']}", row["nsa_over_dense"]["tokens_per_s"]

    at_2k = [row for row in whole if row["length"] == 2 * K]
    return [
        *_judge("NSA's tokens/s over dense at 2k", ">=", 0.8, map(speed, at_2k)),
        *_judge(
            "NSA's tokens/s over dense from 8k on",
            ">=",
            1,
            (speed(row) for row in whole if row["length"] >= 8 * K),
        ),
        *_judge(
            "tokens/s of M7C at 2k on one H200",
            ">=",
            250_000,
            ((speed(row)[0], row["contenders"]["nsa"]["tokens_per_s"]) for row in at_2k),
        ),
    ]


def best_dense(row: Row) -> float | None:
    """How many times as long as NSA the fastest dense attention took, forward and backward."""
    found = (row["ratios"].get(name, {}).get("forward_backward") for name in DENSE)
    return min((times for times in found if times is not None), default=None)


def _even(rows: Sequence[Row]) -> list[tuple[str, float | None]]:
    """The shortest measured length at which, and beyond which, NSA is no slower."""
    measured = [(row["length"], times) for row in rows if (times := best_dense(row)) is not None]
    if not measured:
        return []
    even: float = float("inf")
    for length, times in sorted(measured, reverse=True):
        if times < 1:
            break
        even = length
    lengths = sorted(length for length, _ in measured)
    return [(f"{BIG}, {lengths[0]} to {lengths[-1]}", even)]


def _peak(row: Row) -> float | None:
    times = row["ratios"].get("sdpa-flash", {}).get("peak_bytes")
    return ratio(1.0, times)


def _case(row: Row, name: str = "") -> str:
    return f"{row['shape']} T={row['length']} {name}".strip()


def _judge(
    what: str, sense: str, bound: float, values: Iterable[tuple[str, float | None]]
) -> list[Row]:
    goal = {"what": what, "wanted": f"{sense} {bound:,}"}
    judged = [
        {
            **goal,
            "case": case,
            "value": value if value != float("inf") else None,
            "reached": value >= bound if sense == ">=" else value <= bound,
        }
        for case, value in values
        if value is not None
    ]
    return judged or [{**goal, "case": None, "value": None, "reached": None}]
