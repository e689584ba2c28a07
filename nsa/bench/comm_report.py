"""What `python -m nsa.bench comm` has found: lines, a file, tables and a picture."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from nsa.report.markdown import table

SLOW = 1.0  # Gbit/s of the picture, where communication shows most

Row = Mapping[str, Any]


def print_row(row: Row) -> None:
    """One case at one rate, as it is found."""
    print(
        f"{_name(row)}, accumulation {row['accumulation']}, {row['reduce_dtype']}, {_rate(row)}: "
        f"{row['bytes_per_parameter_per_step']:.2f} bytes a parameter, "
        f"{_ms(row['step_seconds'])} ms, {_ms(row.get('exposed_seconds'))} exposed",
        flush=True,
    )


def write(result: Mapping[str, Any], out: Path) -> None:
    """Keep it as JSON, with its page and its picture beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        ".json": json.dumps(result, indent=1) + "\n",
        ".md": page(result, out.stem),
        ".svg": picture(result),
    }
    for ending, text in texts.items():
        draft = out.with_suffix(".part")  # a reader sees the last whole file
        draft.write_text(text, encoding="utf-8")
        draft.replace(out.with_suffix(ending))


def page(result: Mapping[str, Any], name: str) -> str:
    """Every row as Markdown, with what they were measured on; `name`: the picture's."""
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    parts = [
        "# Communication, measured\n",
        f"Written by `{result['command']}` on {result['date'][:10]}; what follows from it is in "
        "[communication.md](../communication.md).\n",
        f"{result['ranks']} ranks, {result['link']}; {result['hardware']}; {versions}. A model of "
        f"{result['parameters']:,} parameters, micro-batches of "
        f"{result['tokens_per_micro_batch']} tokens. Times are medians in milliseconds; *exposed* "
        "is what a step takes beyond the same step whose collectives return at once; *on the wire* "
        "is bytes over rate; *payload* is what DeepSpeed's comms logger counts, sent by a ring of "
        "two.\n",
        f"![milliseconds a micro-batch]({name}.svg)\n",
        _rows_table(result["rows"]),
    ]
    if result["link"] != "NCCL":
        parts.append(
            "**Not measured: NCCL between GPUs**, with P2P and without. The same command does "
            "that where there are two.\n"
        )
    return "\n".join(parts)


def measured_columns(result: Mapping[str, Any]) -> str:
    """The table for ds_configs/README.md: bytes by accumulation, and how much of a step waits."""
    rows = [row for row in result["rows"] if row["reduce_dtype"] == "bf16"]
    accumulations = sorted({row["accumulation"] for row in rows})
    slow = [row for row in rows if row["rate_gbit"] == SLOW]
    found = {(row["config"], row["accumulation"]): row for row in slow}
    heads = [f"bytes, accumulation {a}" for a in accumulations]
    heads += [f"exposed, {a}" for a in accumulations]
    lines = []
    for config in dict.fromkeys(row["config"] for row in slow):
        mine = [found.get((config, a)) for a in accumulations]
        sent = [f"{row['bytes_per_parameter_per_step']:.2f}" if row else "–" for row in mine]
        waits = [_exposed_share(row) if row else "–" for row in mine]
        lines.append([f"`{config}`", *sent, *waits])
    return _lines(table(["config", *heads], lines))


def picture(result: Mapping[str, Any]) -> str:
    """Milliseconds a micro-batch on the slowest link: computing, and what is exposed on top."""
    rows = [
        row
        for row in result["rows"]
        if row["reduce_dtype"] == "bf16" and row["rate_gbit"] == SLOW and "exposed_seconds" in row
    ]
    labels = [f"{_name(row)}, accumulation {row['accumulation']}" for row in rows]
    left, bar, top = 30 + 7 * max(map(len, labels), default=0), 16, 64
    width, height = left + 560, top + (bar + 8) * len(rows) + 16
    longest = max((row["step_seconds"] / row["accumulation"] for row in rows), default=1.0)
    scale = (width - left - 70) / longest
    shapes = [
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, "Milliseconds a micro-batch at 1 Gbit/s, bf16 reduction", size=15),
        _text(16, 46, "■ computing", "#0072B2"),
        _text(110, 46, "■ exposed communication", "#D55E00"),
    ]
    for at, row, label in zip(itertools.count(top, bar + 8), rows, labels, strict=False):
        count = row["accumulation"]
        compute = min(row["compute_seconds"], row["step_seconds"]) / count * scale
        whole = row["step_seconds"] / count * scale
        shapes += [
            _text(left - 8, at + 12, label, anchor="end"),
            _bar(left, at, compute, "#0072B2"),
            _bar(left + compute, at, whole - compute, "#D55E00"),
            _text(left + whole + 6, at + 12, _ms(row["step_seconds"] / count)),
        ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
    return "\n".join([head, *shapes, "</svg>\n"])


def _rows_table(rows: Sequence[Row]) -> str:
    heads = ["config", "accumulation", "reduced in", "link", "bytes a parameter", "payload"]
    heads += ["step", "computing", "exposed", "on the wire", "hidden"]
    return _lines(table(heads, map(_cells, rows)))


def _cells(row: Row) -> list[str]:
    hidden = row.get("hidden_share")
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


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _name(row: Row) -> str:
    changes = [f"{name} = {value}" for name, value in row["changes"].items()]
    return ", ".join([row["config"], *changes])


def _rate(row: Row) -> str:
    rate = row["rate_gbit"]
    return f"{row['way']}, {'not throttled' if rate is None else f'{rate:g} Gbit/s'}"


def _exposed_share(row: Row) -> str:
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
