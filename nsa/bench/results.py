"""Benchmark results: JSON with one line per row, saved after every case, and printed tables."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa.atomic_io import atomic_write_text
from nsa.bench.environment import environment, pick_device
from nsa.bench.measure import DeviceLost, recover
from nsa.dtypes import DTYPES


class Report:
    """The results of a GPU benchmark, on disk after every case.

    A time limit, a hanging kernel or a lost device costs the case that it interrupts, and nothing
    measured earlier.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.device = pick_device(flags.device)
        self.on_gpu = self.device.type == "cuda"
        self.dtype_name: str = flags.dtype or ("bf16" if self.on_gpu else "fp32")
        self.dtype = DTYPES[self.dtype_name]
        default = "triton" if self.on_gpu else "blockwise"
        self.backend: str = getattr(flags, "backend", None) or default
        self._lost: str | None = None
        self._end = None if flags.limit is None else time.monotonic() + flags.limit
        settings = {name: _plain(value) for name, value in vars(flags).items()}
        del settings["arguments"]
        settings |= {"dtype": self.dtype_name, "device": self.device.type, "backend": self.backend}
        self.data: dict[str, Any] = {
            "environment": environment(flags.arguments, self.device),
            "settings": settings,
            "finished": False,
            "rows": [],
            "skipped": [],
        }
        torch.manual_seed(0)
        self._save()

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row and save."""
        self.data["rows"].append(dict(row))
        self._save()

    def attempt(self, case: str, run: Callable[[], None]) -> None:
        """Run one case; list it under `skipped` if it fails or the time limit is over."""
        reason: str | None = self._lost
        if reason is None and self._end is not None and time.monotonic() >= self._end:
            reason = f"--limit {self.flags.limit:g} s over"
        if reason is None:
            try:
                return run()
            except Exception as error:  # one case, such as one too large, must not end the others
                try:
                    if isinstance(error, DeviceLost):
                        raise
                    reason = recover(error, self.device)
                except DeviceLost as lost:
                    reason = self._lost = str(lost)
        self.data["skipped"].append({"case": case, "reason": reason})
        self._save()
        print(f"{case} NOT MEASURED: {reason}", flush=True)

    def finish(self, **facts: Any) -> None:
        """Add what follows from all rows and save."""
        self.data |= {"finished": not self.data["skipped"], **facts}
        self._save()

    def _save(self) -> None:
        save(self.flags.out, self.data)


def save(out: Path | None, result: Mapping[str, Any]) -> None:
    """Write the result to `--out`, if given."""
    if out is not None:
        atomic_write_text(out, to_json(result))


def to_json(result: Mapping[str, Any]) -> str:
    """JSON with one line per top-level entry and per row."""
    entries = []
    for key, value in result.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value)
            text = f"[\n  {rows}\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _plain(value: Any) -> Any:
    """A flag's value as JSON."""
    if isinstance(value, list):
        return [getattr(item, "name", item) for item in value]
    return str(value) if isinstance(value, Path) else value


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """A quotient of two figures of one run; None if one is missing."""
    return None if numerator is None or not denominator else numerator / denominator


def cell(figure: float | None, form: str = ".3g") -> str:
    """A figure in a printed table; a dash for None."""
    return "-" if figure is None else format(figure, form)


def print_table(rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns, the first one to the left."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *rest in cells:
        right = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *right]), flush=True)


def print_errors(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print why figures of a case are missing, a line each, then a blank line."""
    for name, result in results.items():
        for figure, error in result["errors"].items():
            print(f"  {name}, {figure}: {error}")
    print(flush=True)
