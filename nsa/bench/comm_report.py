"""Results of `python -m nsa.bench comm`: a line per case, and the table of ds_configs/README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsa.report.markdown import table

SLOW = 1.0  # Gbit/s of the table, where communication shows most

Row = Mapping[str, Any]


def print_row(row: Row) -> None:
    """One case at one rate."""
    print(
        f"{_name(row)}, accumulation {row['accumulation']}, {row['reduce_dtype']}, {_rate(row)}: "
        f"{row['bytes_per_parameter_per_step']:.2f} bytes a parameter, "
        f"{_ms(row['step_seconds'])} ms, {_ms(row.get('exposed_seconds'))} exposed",
        flush=True,
    )


def measured_columns(result: Mapping[str, Any]) -> str:
    """The table of ds_configs/README.md: bytes and exposed fraction of a step, by accumulation."""
    rows = [row for row in result["rows"] if row["reduce_dtype"] == "bf16"]
    accumulations = sorted({row["accumulation"] for row in rows})
    slow = {(row["config"], row["accumulation"]): row for row in rows if row["rate_gbit"] == SLOW}
    heads = [f"bytes, accumulation {a}" for a in accumulations]
    heads += [f"exposed, {a}" for a in accumulations]
    lines = []
    for config in dict.fromkeys(config for config, _ in slow):
        by_accumulation = [slow.get((config, a)) for a in accumulations]
        lines.append(
            [
                f"`{config}`",
                *(
                    f"{r['bytes_per_parameter_per_step']:.2f}" if r else "–"
                    for r in by_accumulation
                ),
                *(_exposed_fraction(r) if r else "–" for r in by_accumulation),
            ]
        )
    return _text_of(table(["config", *heads], lines))


def _text_of(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _name(row: Row) -> str:
    changes = [f"{name} = {value}" for name, value in row["changes"].items()]
    return ", ".join([row["config"], *changes])


def _rate(row: Row) -> str:
    rate = row["rate_gbit"]
    return f"{row['transport']}, {'not throttled' if rate is None else f'{rate:g} Gbit/s'}"


def _exposed_fraction(row: Row) -> str:
    return f"{max(0.0, row['exposed_seconds']) / row['step_seconds']:.0%}"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f}"
