"""Speed goals, each a ratio within one case, checked against the rows of a GPU run.

A goal without a measurement stays in the list, with value and verdict None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nsa.bench.baselines import DENSE
from nsa.bench.results import ratio

Row = dict[str, Any]
Value = tuple[str, float | None]  # case, figure
K = 1024
BIG = "64x4x128"
FLA_LENGTHS = (8 * K, 16 * K, 32 * K, 64 * K)


def of_module(rows: Sequence[Row]) -> list[Row]:
    """The goals that `python -m nsa.bench module` measures."""
    big = [row for row in rows if row["kind"] == "module" and row["shape"] == BIG]
    at_64k = [row for row in rows if row["length"] == 64 * K]
    over_fla = [
        (f"{_case(row)} {name}", row["ratios"].get(name, {}).get("forward_backward"))
        for row in rows
        if row["kind"] == "same-pattern" and row["length"] in FLA_LENGTHS
        for name in ("fla", "fla-with-window")
        if name in row["implementations"]
    ]
    over_dense = [(_case(row), _over_best_dense(row)) for row in big if row in at_64k]
    memory, selecting = [], []
    for row in at_64k:
        if row["kind"] == "module":
            over_nsa = row["ratios"].get("sdpa-flash", {}).get("peak_bytes")
            memory.append((_case(row), ratio(1.0, over_nsa)))
        elif row["kind"] == "parts":
            selecting.append((_case(row), row["forward_fraction"]["select_blocks"]))
    return [
        *_check("fla's time over NSA's, same pattern, 8k to 64k, fwd+bwd", ">=", 2, over_fla),
        *_check("length from which NSA is no slower than dense", "<=", 6 * K, _break_even(big)),
        *_check("best dense time over NSA's at 64k, fwd+bwd", ">=", 6, over_dense),
        *_check("NSA's peak memory over dense flash's at 64k", "<=", 1.3, memory),
        *_check("fraction of importance and top-n in the forward at 64k", "<=", 0.35, selecting),
    ]


def of_train(rows: Sequence[Row]) -> list[Row]:
    """The goals that `python -m nsa.bench train` measures, with all 12 layers."""
    short, long, speed = [], [], []
    for row in (row for row in rows if row["layers"] == 12):
        case = f"T={row['length']} batch {row['batch']}"
        over_dense = case, row["nsa_over_dense"]["tokens_per_s"]
        if row["length"] == 2 * K:
            short.append(over_dense)
            speed.append((case, row["implementations"]["nsa"]["tokens_per_s"]))
        elif row["length"] >= 8 * K:
            long.append(over_dense)
    return [
        *_check("NSA's tokens/s over dense at 2k", ">=", 0.8, short),
        *_check("NSA's tokens/s over dense from 8k on", ">=", 1, long),
        *_check("tokens/s of M7C at 2k on one H200", ">=", 250_000, speed),
    ]


def _over_best_dense(row: Row) -> float | None:
    """The fastest dense time over NSA's, forward and backward."""
    times = (row["ratios"].get(name, {}).get("forward_backward") for name in DENSE)
    return min((time for time in times if time is not None), default=None)


def _break_even(rows: Sequence[Row]) -> list[Value]:
    """The shortest measured length from which on NSA is no slower; infinite if there is none."""
    measured = [(row["length"], over) for row in rows if (over := _over_best_dense(row))]
    if not measured:
        return []
    even: float = float("inf")
    for length, over in sorted(measured, reverse=True):
        if over < 1:
            break
        even = length
    return [(f"{BIG}, {min(measured)[0]} to {max(measured)[0]}", even)]


def _case(row: Row) -> str:
    return f"{row['shape']} T={row['length']}"


def _check(what: str, sense: str, bound: float, values: Iterable[Value]) -> list[Row]:
    goal = {"what": what, "wanted": f"{sense} {bound:,}"}
    checked = [
        {
            **goal,
            "case": case,
            "value": value if value != float("inf") else None,
            "reached": value >= bound if sense == ">=" else value <= bound,
        }
        for case, value in values
        if value is not None
    ]
    return checked or [{**goal, "case": None, "value": None, "reached": None}]
