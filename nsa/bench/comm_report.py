"""Results of `python -m nsa.bench comm`: printed lines, JSON, a Markdown page and an SVG chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from nsa.atomic_io import atomic_write_text
from nsa.bench.results import save
from nsa.report.markdown import table

SLOW = 1.0  # Gbit/s of the chart and the table of configs, where communication shows most

Row = Mapping[str, Any]


def print_row(row: Row) -> None:
    """One case at one rate."""
    print(
        f"{_name(row)}, accumulation {row['accumulation']}, {row['reduce_dtype']}, {_rate(row)}: "
        f"{row['bytes_per_parameter_per_step']:.2f} bytes a parameter, "
        f"{_ms(row['step_seconds'])} ms, {_ms(row.get('exposed_seconds'))} exposed",
        flush=True,
    )


def write(result: Mapping[str, Any], out: Path) -> None:
    """Save the JSON, with its page and chart beside it."""
    save(out, result)
    atomic_write_text(out.with_suffix(".md"), page(result, out.stem))
    atomic_write_text(out.with_suffix(".svg"), chart(result))


def page(result: Mapping[str, Any], name: str) -> str:
    """Every row as Markdown, with what they were measured on; `name` is the chart's."""
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    heads = ["config", "accumulation", "reduced in", "link", "bytes a parameter", "payload"]
    heads += ["step", "computing", "exposed", "on the wire", "hidden"]
    parts = [
        "# Communication, measured\n",
        f"Written by `{result['command']}` on {result['date'][:10]}; conclusions are in "
        "[communication.md](../communication.md).\n",
        f"{result['ranks']} ranks, {result['link']}; {result['hardware']}; {versions}. A model of "
        f"{result['parameters']:,} parameters, micro-batches of "
        f"{result['tokens_per_micro_batch']} tokens. Times are medians in milliseconds; *exposed* "
        "is how much longer a step takes than the same step whose collectives return at once; *on "
        "the wire* is bytes over rate; *payload* is what DeepSpeed's comms logger counts, as sent "
        "by a ring of two.\n",
        f"![milliseconds a micro-batch]({name}.svg)\n",
        _text_of(table(heads, map(_cells, result["rows"]))),
    ]
    if result["link"] != "NCCL":
        parts.append(
            "**Not measured: NCCL between GPUs**, with P2P and without. The same command measures "
            "it on a machine with two.\n"
        )
    return "\n".join(parts)


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


def chart(result: Mapping[str, Any]) -> str:
    """Milliseconds per micro-batch on the slowest link: compute, and exposed communication."""
    rows = [
        row
        for row in result["rows"]
        if row["reduce_dtype"] == "bf16" and row["rate_gbit"] == SLOW and "exposed_seconds" in row
    ]
    labels = [f"{_name(row)}, accumulation {row['accumulation']}" for row in rows]
    left, pitch, top = 30 + 7 * max(map(len, labels), default=0), 24, 64
    width, height = left + 560, top + pitch * len(rows) + 16
    longest = max((row["step_seconds"] / row["accumulation"] for row in rows), default=1.0)
    scale = (width - left - 70) / longest
    shapes = [
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, "Milliseconds a micro-batch at 1 Gbit/s, bf16 reduction", size=15),
        _text(16, 46, "■ computing", "#0072B2"),
        _text(110, 46, "■ exposed communication", "#D55E00"),
    ]
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        y, count = top + pitch * number, row["accumulation"]
        compute = min(row["compute_seconds"], row["step_seconds"]) / count * scale
        step = row["step_seconds"] / count * scale
        shapes += [
            _text(left - 8, y + 12, label, anchor="end"),
            _bar(left, y, compute, "#0072B2"),
            _bar(left + compute, y, step - compute, "#D55E00"),
            _text(left + step + 6, y + 12, _ms(row["step_seconds"] / count)),
        ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
    return "\n".join([head, *shapes, "</svg>\n"])


def _cells(row: Row) -> list[str]:
    hidden = row.get("hidden_fraction")
    return [
        _name(row),
        str(row["accumulation"]),
        row["reduce_dtype"],
        _rate(row),
        f"{row['bytes_per_parameter_per_step']:.2f}",
        f"{row['payload_bytes_per_parameter_per_step']:.2f}",
        *[_ms(row.get(f"{name}_seconds")) for name in ("step", "compute", "exposed", "wire")],
        "–" if hidden is None else f"{hidden:.0%}",
    ]


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


def _text(
    x: float, y: float, text: str, colour: str = "#222222", anchor: str = "start", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="{size}" '
        f'fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y + 1:.1f}" width="{max(0.0, width):.1f}" height="14" '
        f'fill="{colour}"/>'
    )
